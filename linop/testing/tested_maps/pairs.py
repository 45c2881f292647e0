"""Pairs of a forward function and its adjoint, written by hand, for checks: the public `pair`, and
the class that binds one to a backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from linop.backends.engine.base import Backend
from linop.backends.engine.worker import Worker
from linop.errors import ArgumentError, BackendError
from linop.local_operators.real_linear import real_linear
from linop.spaces.region import Region, naturals
from linop.spaces.space import Space
from linop.testing.tested_maps.tested_map import Function, TestedMap, gathered
from linop.testing.tested_maps.whole import with_inner

Side = Space | Region | Sequence[int] | int | None
"""Domain or codomain of a pair: a space, a region, or the shape of the array that this worker holds
(None if it holds none)."""


@dataclass(frozen=True)
class Pair:
    """A forward function and its adjoint, for checks. Built by `pair`, `torch_function` and
    `pylops_mpi_operator`; the attributes are those of `TestedMap`.

    Example:
        A pair is checked as an operator is, and so is its adjoint:

        >>> twice = linop.testing.pair(lambda x: 2 * x, lambda y: 2 * y, 3, 3, name="twice")
        >>> twice.name, twice.H.name, bool(linop.testing.check_adjoint(twice.H))
        ('twice', 'twice.H', True)
    """

    forward: Function
    adjoint: Function | None
    domain: Side
    codomain: Side
    dtypes: tuple[np.dtype[Any], np.dtype[Any]]
    name: str
    real: bool = False
    flat: bool = False
    memory: str = "default"
    """The kind of memory of the functions' arrays, if only shapes are given."""
    said: str = ""
    inner: tuple[Any, Any] | None = None
    """The inner products of domain and codomain, as for `Space`; None for those of the sides."""
    adapted: Any = None
    """The matrix or the operator of SciPy or PyLops that this is a pair of; None for functions."""

    @property
    def sides(self) -> tuple[tuple[Side, np.dtype[Any]], ...]:
        """Domain and codomain, each with the dtype that it has if it is no `Space`."""
        return (self.domain, self.dtypes[0]), (self.codomain, self.dtypes[1])

    @property
    def _says_real(self) -> bool:
        return real_linear(self.adapted, self.forward, self.adjoint)

    @property
    def H(self) -> Pair:
        """The pair with forward and adjoint exchanged.

        Raises:
            ArgumentError: there is no adjoint.
        """
        if self.adjoint is None:
            raise ArgumentError(f"{self.name} has no adjoint")
        return replace(
            self,
            forward=self.adjoint,
            adjoint=self.forward,
            domain=self.codomain,
            codomain=self.domain,
            dtypes=self.dtypes[::-1],
            inner=None if self.inner is None else self.inner[::-1],
            name=f"{self.name}.H",
        )

    def bound(self, backend: Backend) -> TestedMap:
        """The pair bound to a backend, as a `TestedMap`. Collective: workers gather their shapes.

        Raises:
            BackendError: the backend has too few workers for the spaces.
        """
        domain = self._space("x", self.domain, self.dtypes[0], backend)
        codomain = self._space("y", self.codomain, self.dtypes[1], backend)
        _check_workers(self.name, (domain, codomain), backend)
        for space in (domain, codomain):
            for region in space:
                backend.arrays.of(region.memory).check_dtype(space.dtype)
        kinds = {domain.dtype.kind, codomain.dtype.kind}
        name = f"<{codomain.size}x{domain.size} {self.name}>"
        bound = TestedMap(
            name,
            domain,
            codomain,
            self.forward,
            self.adjoint,
            backend,
            real=self.real or ("c" in kinds and (len(kinds) > 1 or self._says_real)),
            foreign=True,
            flat=self.flat,
            anonymous=not isinstance(self.domain, Space | Region),
            said=self.said,
        )
        return with_inner(bound, self.inner)

    def _space(self, letter: str, side: Side, dtype: np.dtype[Any], backend: Backend) -> Space:
        """The space of a side; from shapes, one region per worker that holds an array."""
        if isinstance(side, Space):
            return side
        if isinstance(side, Region):
            return Space(side, dtype)
        shape = None if side is None else naturals(side, "shape of a side of a pair")
        if self.flat or not isinstance(backend, Worker):
            shapes = [shape]
        else:
            shapes = gathered(backend, shape)
            letter += "{}"
        held = [(letter.format(w), s, w) for w, s in enumerate(shapes) if s is not None]
        return Space([Region(name, s, w, self.memory) for name, s, w in held], dtype)


def pair(
    forward: Function,
    adjoint: Function | None,
    domain: Side,
    codomain: Side,
    *,
    dtype: npt.DTypeLike = np.float64,
    name: str | None = None,
    inner: tuple[Any, Any] | None = None,
) -> Pair:
    """A forward function and its adjoint, written by hand, as a pair for all checks.

    On a backend that holds all workers (``"reference"``) the functions get complete vectors. On a
    backend of one worker (``"mpi"``, or inside `linop.launch`) all workers call their functions at
    the same time, with the arrays that they hold, so the functions may communicate, by raw mpi4py
    for instance. Arrays are those of the backend: on a device backend device arrays, except for
    regions in host memory.

    Args:
        forward, adjoint: functions of a bare array if the worker holds one region of the side, of a
            dict by region name if it holds several, of None if it holds none; results likewise.
            They must not change their argument, nor return its memory. `adjoint` may be None for
            checks that do not call it.
        domain, codomain: a `Space`, `TensorSpace` or `Region`; or the shape of the array that
            *this* worker holds (None if it holds none), which may differ between workers. Regions
            are then called ``x`` and ``y``, or ``x0``, ``x1``, … and ``y0``, ``y1``, … by worker.
        dtype: of the arrays, if a shape or a `Region` is given. If the dtypes of the two spaces are
            real and complex, inner products are compared in their real parts.
        name: in reports; by default the names of the functions.
        inner: the inner products of domain and codomain that the two functions are adjoint for,
            each as for `linop.Space`; by default those of the spaces.

    Raises:
        ArgumentError: `forward` or `adjoint` cannot be called.

    Example:
        Functions of each worker's own array, which may send messages:

        >>> def program(backend):
        ...     one = linop.testing.pair(lambda x: 2 * x, lambda y: 2 * y, 3, 3, name="twice")
        ...     return str(linop.testing.check_adjoint(one, backend)).splitlines()[0]
        >>> print(linop.launch(program, workers=2)[1])
        dot-product test on threads passed for <6x6 twice>: ...
    """
    for what, function in (("forward", forward), ("adjoint", adjoint)):
        if not callable(function) and not (function is None and what == "adjoint"):
            raise ArgumentError(f"pair: {what} is a function; given {function!r}")
    known = name or " and ".join(map(_called, filter(None, (forward, adjoint))))
    dtypes = (np.dtype(dtype),) * 2
    return Pair(forward, adjoint, domain, codomain, dtypes, known, inner=inner)


def _check_workers(name: str, spaces: Sequence[Space], backend: Backend) -> None:
    """Check that the backend has every worker of the spaces; other regions would not be checked.

    Raises:
        BackendError: a worker is missing.
    """
    missing = {w for s in spaces for w in s.workers if w >= (backend.workers or w + 1)}
    if missing:
        raise BackendError(
            f"{name}: its spaces have regions on the workers {sorted(missing)}; backend "
            f"{backend.name!r} has workers 0 to {(backend.workers or 0) - 1}"
        )


def _called(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)
