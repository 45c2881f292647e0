"""Functions of flat vectors as functions of regions' arrays, for every array module."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy

from linop.normal_form.maps import Function
from linop.spaces.array_modules import HOST, Namespace
from linop.spaces.space import Space
from linop.spaces.vector import Vector


def product(namespace: Namespace, A: Any) -> Function:
    """The function x -> A @ x on flat vectors of an array module. Elements of x that are not finite
    reach only the results of rows that have a non-zero entry in their column.

    Args:
        namespace: the array module, to which A is copied.
        A: a NumPy array or a SciPy sparse matrix.
    """
    if scipy.sparse.issparse(A):
        return _sparse_product(namespace, scipy.sparse.csr_array(A))
    full = A.dtype.kind in "iu" or bool(A.all())
    if full or namespace.ndarray is np.ndarray:
        return _dense_product(namespace.put(A), None if full else scipy.sparse.csr_array(A))
    return _sparse_product(namespace, scipy.sparse.csr_array(A))


def _dense_product(dense: Any, sparse: scipy.sparse.csr_array | None) -> Function:
    """x -> dense @ x.

    Args:
        sparse: the same matrix without its zeros, which multiplies an x that has infinities or NaN:
            0 times these is NaN. None if that cannot be.
    """
    if sparse is None:
        return lambda x: dense @ x
    return lambda x: dense @ x if np.isfinite(x).all() else sparse @ x


def _sparse_product(namespace: Namespace, A: scipy.sparse.csr_array) -> Function:
    """x -> A @ x.

    CuPy's sparse matrices have no integer dtypes. There, row sums are differences of a cumulative
    sum, which is exact, since integers wrap modulo 2^bits.
    """
    if namespace.ndarray is np.ndarray:
        return lambda x: A @ x
    if A.dtype.kind in "fc":
        sparse = namespace.scipy("sparse").csr_matrix(A)
        return lambda x: sparse @ x
    data, columns, ends = map(namespace.put, (A.data, A.indices, A.indptr))

    def multiply(x: Any) -> Any:
        totals = namespace.module.zeros(len(A.data) + 1, A.dtype)
        totals[1:] = namespace.module.cumsum(data * x[columns], dtype=A.dtype)
        return totals[ends[1:]] - totals[ends[:-1]]

    return multiply


def on_regions(f: Function, source: Space, target: Space, namespace: Namespace = HOST) -> Function:
    """A function of flat vectors, which leaves its argument as it is, as one of the bare array or
    dict of arrays of two spaces."""
    if namespace.ndarray is not np.ndarray:
        return _on_device_regions(f, source, target, namespace)

    def apply(x: Any) -> Any:
        vector = x if isinstance(x, Vector) else source.vector({} if x is None else x)
        return target.unflatten(f(source.flatten(vector))).arrays

    if len(source) != 1 or len(target) != 1:
        return apply
    shape, wanted, dtype = source.regions[0].shape, target.regions[0].shape, target.dtype

    def apply_to_array(x: Any) -> Any:
        if type(x) is not np.ndarray or x.shape != shape:
            return apply(x)
        y = f(x.reshape(-1))
        fits = type(y) is np.ndarray and y.size == target.size and y.dtype == dtype
        return y.reshape(wanted) if fits else target.unflatten(y).arrays

    return apply_to_array


def _on_device_regions(f: Function, source: Space, target: Space, namespace: Namespace) -> Function:
    """`on_regions` for device arrays. They come from a plan, which has checked them."""
    starts = [(r, target.offsets[r.name]) for r in target.regions]

    def apply(x: Any) -> Any:
        given = x if len(source) != 1 else {source.regions[0].name: x}
        pieces = [given[r.name].ravel() for r in source.regions]
        flat = (
            namespace.module.concatenate(pieces)
            if pieces
            else namespace.put(np.zeros(0, source.dtype))
        )
        y = f(flat)
        arrays = {r.name: y[k : k + r.size].reshape(r.shape) for r, k in starts}
        return arrays if len(target) != 1 else arrays[target.regions[0].name]

    return apply
