"""A forward function and its adjoint, hand-written, as what checks take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from linop.backends.base import Backend
from linop.backends.worker import Worker
from linop.errors import ArgumentError, BackendError
from linop.spaces.region import Region, naturals
from linop.spaces.space import Space
from linop.testing.subjects.subject import Function, Subject, gathered

Place = Space | Region | Sequence[int] | int | None
"""Where a side lives: a space, a region, or the shape of the array that this worker holds."""


@dataclass(frozen=True)
class Pair:
    """A forward function and its adjoint, for checks. Made by `pair` and `torch_function`."""

    forward: Function
    adjoint: Function | None
    domain: Place
    codomain: Place
    dtypes: tuple[np.dtype[Any], np.dtype[Any]]
    name: str
    real: bool = False
    flat: bool = False
    memory: str = "default"
    """Where the arrays are that the functions compute with, if shapes alone are given."""

    @property
    def H(self) -> Pair:
        """The same pair, the other way round."""
        if self.adjoint is None:
            raise ArgumentError(f"{self.name} has no adjoint")
        return replace(
            self,
            forward=self.adjoint,
            adjoint=self.forward,
            domain=self.codomain,
            codomain=self.domain,
            dtypes=self.dtypes[::-1],
            name=f"{self.name}.H",
        )

    def bound(self, backend: Backend) -> Subject:
        """On a backend; collective, since workers tell each other the shapes that they hold."""
        domain = self._space("x", self.domain, self.dtypes[0], backend)
        codomain = self._space("y", self.codomain, self.dtypes[1], backend)
        _check_workers(self.name, (domain, codomain), backend)
        for space in (domain, codomain):
            for region in space:
                backend.arrays.of(region.memory).check_dtype(space.dtype)
        kinds = {domain.dtype.kind, codomain.dtype.kind}
        name = f"<{codomain.size}x{domain.size} {self.name}>"
        return Subject(
            name,
            domain,
            codomain,
            self.forward,
            self.adjoint,
            backend,
            real=self.real or ("c" in kinds and len(kinds) > 1),
            foreign=True,
            flat=self.flat,
            anonymous=not isinstance(self.domain, Space | Region),
        )

    def _space(self, letter: str, place: Place, dtype: np.dtype[Any], backend: Backend) -> Space:
        """The space that a place stands for."""
        if isinstance(place, Space):
            return place
        if isinstance(place, Region):
            return Space(place, dtype)
        shape = None if place is None else naturals(place, "shape of a side of a pair")
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
    domain: Place,
    codomain: Place,
    *,
    dtype: npt.DTypeLike = np.float64,
    name: str | None = None,
) -> Pair:
    """A hand-written forward and adjoint, for all checks.

    On a backend that holds all workers (``"reference"``) the functions get whole vectors. On one
    worker's (``"mpi"``, or inside `linop.launch`) every worker calls its own, at the same time,
    with what it holds; so they may communicate, by raw mpi4py for instance. They get and return
    the backend's arrays: on a device its own, but for regions in host memory.

    Args:
        forward, adjoint: get and return the bare array of a side with one region, a dict by region
            name where it holds several, None where it holds none. They must not change their
            argument, nor return its memory. The adjoint may be None where a check needs none.
        domain, codomain: `Space` or `TensorSpace`; or the shape of the array that *this* worker
            holds (None: it holds none), which may differ between workers: the regions are then
            ``x`` and ``y``, or ``x0``, ``x1``, … and ``y0``, ``y1``, … by worker.
        dtype: of the arrays, where a shape or a `Region` is given. If one side is real and the
            other complex, inner products are compared in their real parts.
        name: in reports.
    """
    for what, function in (("forward", forward), ("adjoint", adjoint)):
        if not callable(function) and not (function is None and what == "adjoint"):
            raise ArgumentError(f"pair: {what} is a function; given {function!r}")
    known = name or " and ".join(map(_called, filter(None, (forward, adjoint))))
    return Pair(forward, adjoint, domain, codomain, (np.dtype(dtype),) * 2, known)


def _check_workers(name: str, spaces: Sequence[Space], backend: Backend) -> None:
    """Check that there is somebody for every region: else nobody would look at it.

    Raises:
        BackendError: there is not.
    """
    missing = {w for s in spaces for w in s.workers if w >= (backend.workers or w + 1)}
    if missing:
        raise BackendError(
            f"{name}: its spaces have regions on the workers {sorted(missing)}; backend "
            f"{backend.name!r} has workers 0 to {(backend.workers or 0) - 1}"
        )


def _called(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)
