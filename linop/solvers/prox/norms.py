"""Proximal maps of norms of whole vectors, of groups of elements, and of singular values."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from linop.errors import ArgumentError, PartitionError, ShapeError, SpaceError, expect
from linop.operators.collectives import gather
from linop.solvers.prox.elementwise import shrinkage
from linop.solvers.prox.maps import ANY, ProximalMap, array_like, counted, mapped, positive, total
from linop.spaces.region import Region, integer
from linop.spaces.scalars import Scalar
from linop.spaces.space import Space
from linop.spaces.tensor import TensorSpace
from linop.spaces.vector import Vector


def l2(sigma: float = 1.0) -> ProximalMap:
    """sigma ‖x‖₂, of the whole vector, in the norm of its space: its `prox` takes one reduction
    over the workers.

    Raises:
        ArgumentError: sigma is not positive.

    Example:
        >>> X = linop.Space(linop.Region("x", (2,)))
        >>> v, f = X.vector(np.array([3.0, 4.0])), linop.solvers.prox.l2()
        >>> f(v), (2 * f.prox(v, 2.5))["x"].tolist()  # its length, 5, becomes 2.5
        (5.0, [3.0, 4.0])
    """
    return _L2(positive("l2: sigma", sigma))


class _L2(ProximalMap):
    inner_products = ANY

    def __init__(self, sigma: float) -> None:
        self._sigma, self.name = sigma, f"l2({sigma:g})"

    def _prox(self, v: Vector, step: float) -> Vector:
        norm, least = float(v.norm()), self._sigma * step
        factor = 0.0 if norm <= least else 1 - least / norm
        return mapped("shrink", lambda a, name: a * factor, v)

    def partial(self, v: Vector) -> dict[int, Scalar]:
        return v.space.partial_inners(v, v)

    def of_sum(self, number: Scalar) -> float:
        return self._sigma * math.sqrt(super().of_sum(number))


def group(
    dim: int | None = None, sigma: float = 1.0, *, labels: npt.ArrayLike | None = None
) -> ProximalMap:
    """sigma times the sum of the 2-norms of groups of elements (l2,1); without messages.

    Args:
        dim: each line along this dimension of a tensor, or of each region, is a group.
        labels: or an array of whole numbers, of the shape of the tensor, or of the only region:
            equal numbers make a group. On the host alone.

    Raises:
        ArgumentError: neither or both of dim and labels are given; sigma is not positive; labels
            are no whole numbers. When a vector is given: PartitionError: a group is in several
            blocks. ShapeError: dim or labels do not fit its space.

    Example:
        The columns of a matrix, (3, 4) and (0, 1), are groups: those shorter than the step vanish:

        >>> X = linop.TensorSpace((2, 2), linop.Partition((1, 2)))
        >>> v, f = X.scatter(np.array([[3.0, 0.0], [4.0, 1.0]])), linop.solvers.prox.group(0)
        >>> f(v), (2 * X.gather(f.prox(v, 2.5))).tolist()
        (6.0, [[3.0, 0.0], [4.0, 0.0]])
    """
    if (dim is None) == (labels is None):
        raise ArgumentError(f"group: give dim or labels; given dim={dim!r} and labels={labels!r}")
    sigma = positive("group: sigma", sigma)
    if dim is not None:
        return _Lines(integer(dim, "dim"), sigma)
    array = np.asarray(labels)
    if array.dtype.kind not in "iu":
        raise ArgumentError(f"group: labels are whole numbers; given an array of {array.dtype}")
    return _Labelled(array, sigma)


class _Lines(ProximalMap):
    """Groups along a dimension."""

    def __init__(self, dim: int, sigma: float) -> None:
        self._dim, self._sigma, self.name = dim, sigma, f"group({dim}, {sigma:g})"

    def check(self, space: Space) -> None:
        super().check(space)
        ndim = min((r.ndim for r in space.regions), default=0)
        if not -ndim <= self._dim < ndim:
            raise ShapeError(f"group: no dimension {self._dim} in arrays of {ndim} dimensions")
        if isinstance(space, TensorSpace) and len(space.bounds[self._dim]) > 1:
            raise PartitionError(
                f"group: dimension {self._dim} of the tensor is cut over workers, "
                f"{space.bounds[self._dim]}, and with it each group; linop.repartition to a "
                f"partition that leaves it whole"
            )

    def _prox(self, v: Vector, step: float) -> Vector:
        least = self._sigma * step
        return mapped("group", lambda a, name: a * shrinkage(lengths(a, self._dim), least), v)

    def partial(self, v: Vector) -> dict[int, Scalar]:
        return counted(lambda a, name: total(lengths(a, self._dim)), v)

    def of_sum(self, number: Scalar) -> float:
        return self._sigma * super().of_sum(number)


def lengths(a: Any, dim: int) -> Any:
    """The 2-norms of the lines along a dimension, which is kept with extent 1."""
    return np.sqrt(squares(a).sum(axis=dim, keepdims=True))


def squares(a: Any) -> Any:
    """The squared moduli of an array."""
    return a.real**2 + a.imag**2 if a.dtype.kind == "c" else a * a


class _Labelled(ProximalMap):
    """Groups of elements with equal labels."""

    def __init__(self, labels: npt.NDArray[Any], sigma: float) -> None:
        self._labels, self._sigma, self.name = labels, sigma, f"group(labels, {sigma:g})"
        self._known: dict[Space, dict[str, npt.NDArray[Any]]] = {}

    def check(self, space: Space) -> None:
        super().check(space)
        if space not in self._known:
            self._known[space] = self._numbered(space)

    def _numbered(self, space: Space) -> dict[str, npt.NDArray[Any]]:
        """Numbers of the groups from 0 of each region."""
        shape = space.global_shape if isinstance(space, TensorSpace) else self._only(space).shape
        if self._labels.shape != shape:
            raise ShapeError(f"group: labels of shape {self._labels.shape} given, {shape} expected")
        first: dict[Any, Hashable] = {}
        found = {}
        for region, where in _blocks(space):
            here, numbers = np.unique(self._labels[where], return_inverse=True)
            found[region.name] = numbers.reshape(-1)
            for label in here.tolist():
                if first.setdefault(label, repr(where)) != repr(where):
                    raise PartitionError(
                        f"group: the elements of label {label} are in several blocks, "
                        f"{first[label]} and {where}; linop.repartition to blocks that hold whole "
                        f"groups"
                    )
        return found

    def _only(self, space: Space) -> Region:
        if len(space) != 1:
            raise SpaceError(
                f"group: labels fit a TensorSpace, or a space of one region; given {space}"
            )
        return space.regions[0]

    def _lengths(self, v: Vector, a: Any, name: str) -> tuple[Any, Any]:
        numbers = self._known[v.space][name]
        return numbers, np.sqrt(np.bincount(numbers, squares(a).reshape(-1)))

    def _prox(self, v: Vector, step: float) -> Vector:
        def shrunk(a: Any, name: str) -> Any:
            numbers, norms = self._lengths(v, a, name)
            return a * shrinkage(norms, self._sigma * step)[numbers].reshape(a.shape)

        return mapped("group", shrunk, v)

    def partial(self, v: Vector) -> dict[int, Scalar]:
        return counted(lambda a, name: self._lengths(v, a, name)[1].sum(), v)

    def of_sum(self, number: Scalar) -> float:
        return self._sigma * super().of_sum(number)


def _blocks(space: Space) -> Iterator[tuple[Region, tuple[Any, ...]]]:
    """Each region and its index in the global array."""
    for region in space.regions:
        yield region, space.block(region) if isinstance(space, TensorSpace) else (...,)


def nuclear(sigma: float = 1.0, X: TensorSpace | None = None, backend: Any = None) -> ProximalMap:
    """sigma times the sum of the singular values of a matrix, which one worker holds: its proximal
    map is soft thresholding of the singular values (Cai, Candès & Shen 2010).

    Args:
        X: the space of a matrix that is cut over workers: it is gathered on the first of them,
            which computes, and scattered again.
        backend: of the vectors, if X is given in an SPMD program; compiling is collective.

    Raises:
        ArgumentError: sigma is not positive. ShapeError: X is no matrix. PartitionError: X holds
            copies. When a vector is given: SpaceError: it is of several regions, or no matrix.

    Example:
        >>> X = linop.TensorSpace((2, 2), linop.Partition((2,)), name="x")  # rows, on two workers
        >>> f = linop.solvers.prox.nuclear(1.0, X)
        >>> v = X.scatter(np.diag([3.0, 0.5]))
        >>> w = X.gather(f.prox(v, 1.0))  # singular values are smaller by 1, or zero
        >>> np.allclose(w, np.diag([2.0, 0.0]))
        True
    """
    sigma = positive("nuclear: sigma", sigma)
    if X is None:
        return _Nuclear(sigma, None)
    if expect("nuclear: X", X, TensorSpace).ndim != 2:
        raise ShapeError(f"nuclear: a matrix expected, given a tensor of shape {X.global_shape}")
    op = gather(X, X.workers[0])
    return _Nuclear(sigma, op if backend is None else op.compile(backend))


class _Nuclear(ProximalMap):
    def __init__(self, sigma: float, gathered: Any) -> None:
        self._sigma, self._gathered, self.name = sigma, gathered, f"nuclear({sigma:g})"

    def check(self, space: Space) -> None:
        super().check(space)
        if self._gathered is not None:
            self._gathered.domain.same_as(space, "nuclear")
        elif len(space) != 1 or space.regions[0].ndim != 2:
            raise SpaceError(
                f"nuclear: one region that holds a matrix expected, given {space}; of a matrix "
                f"that is cut over workers, give its space, nuclear(sigma, X, backend)"
            )

    def _prox(self, v: Vector, step: float) -> Vector:
        whole = v if self._gathered is None else self._gathered(v)
        found = mapped("singular values", lambda a, name: self._shrunk(a, step), whole)
        return found if self._gathered is None else self._gathered.H(found)

    def _shrunk(self, a: Any, step: float) -> Any:
        u, values, vh = np.linalg.svd(_wide(a), full_matrices=False)
        return (u * np.maximum(values - self._sigma * step, 0)) @ vh

    def partial(self, v: Vector) -> dict[int, Scalar]:
        whole = v if self._gathered is None else self._gathered(v)
        return counted(lambda a, name: np.linalg.svd(_wide(a), compute_uv=False).sum(), whole)

    def of_sum(self, number: Scalar) -> float:
        return self._sigma * super().of_sum(number)


def _wide(a: Any) -> Any:
    """A matrix in double precision, which LAPACK takes."""
    return array_like(a, np.dtype(np.complex128 if a.dtype.kind == "c" else np.float64))
