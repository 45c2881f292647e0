"""Elementwise multiplication by an array as a local map, on arrays of any module."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy

from linop.normal_form.maps import Function, LocalMap
from linop.spaces.array_modules import HOST, Namespace
from linop.spaces.scalars import Array, sparse_dtype
from linop.spaces.space import Space


def multiplication(d: Array, space: Space, name: str) -> LocalMap:
    """The map x -> d x of a space of one region, of the shape and dtype of d."""
    zeros = None if d.dtype.kind in "iu" or d.all() else d == 0

    def port(namespace: Namespace) -> tuple[Function, Function]:
        here = namespace.put(d)
        if zeros is None:
            return (lambda x: here * x), (lambda y: here.conj() * y)
        off, none = namespace.put(zeros), namespace.put(np.zeros((), d.dtype))
        where = namespace.module.where  # 0 times infinity or NaN, which does not depend on them

        def forward(x: Any) -> Any:
            return here * where(off, none, x)

        def backward(y: Any) -> Any:
            return here.conj() * where(off, none, y)

        return forward, backward

    def known() -> scipy.sparse.csr_array:
        values = d.ravel().astype(sparse_dtype(d.dtype))
        made = scipy.sparse.csr_array((values, (np.arange(d.size),) * 2), shape=(d.size, d.size))
        made.eliminate_zeros()
        return made

    return LocalMap(space, space, *port(HOST), name, known, port, fresh=True)
