"""Named axes of a partition of all workers: strategies take one axis each, and so combine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from linop.backends import Backend
from linop.backends.engine.worker import Worker
from linop.errors import ArgumentError, BackendError
from linop.layers.agreement.input_agreement import agreement_of, program_backend
from linop.spaces.partition import Partition
from linop.spaces.region import integer


@dataclass(frozen=True)
class Axis:
    """The workers along an axis of a mesh, on this worker: a group of their own.

    Attributes:
        name: of the axis, or of several, such as "dp, tp".
        workers: the group, as workers of the mesh's backend, in the order of the axis.
        index: this worker's position among them.
        backend: the group's own, where this worker has the number `index`; layers, plans and
            pipelines made under ``linop.backends.use(axis.backend)`` are the group's.
        extents: of the axes that it joins; empty for one that no mesh has made.

    Example:
        Of four workers in two rows, worker 3 is the second one of its column:

        >>> def program(backend):
        ...     dp = strategies.Mesh(dp=2, tp=2)["dp"]
        ...     return dp.workers, dp.index, dp.size, dp.backend.worker
        >>> linop.launch(program, workers=4)[3]
        ((1, 3), 1, 2, 1)
    """

    name: str
    workers: tuple[int, ...]
    index: int
    backend: Backend
    extents: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """The number of workers."""
        return len(self.workers)

    @property
    def partition(self) -> Partition:
        """The group as a grid of one axis, of workers of its own backend."""
        return Partition((self.size,))


class Mesh:
    """Named axes of one `linop.Partition` of all workers of a backend: ``Mesh(dp=2, tp=2, pp=2)``.
    Collective.

    ``mesh["dp"]`` is what strategies take: the `Axis` of this worker's group, of workers whose
    other coordinates are the same. ``mesh["dp", "tp"]`` joins several, of which the last varies
    fastest. An axis is collective when it is first asked for.

    Args:
        backend: by default the current one.
        axes: name and extent of each. One of them may be -1: all other workers. Workers are in
            row-major order: neighbours along the last axis have consecutive numbers.

    Attributes:
        backend: of all workers.
        partition: the grid.
        names: of its axes.

    Raises:
        ArgumentError: the extents are not those of a grid of all workers. BackendError: workers
            make different meshes, or one process holds all workers; on every worker.

    Example:
        >>> def program(backend):
        ...     mesh = strategies.Mesh(dp=-1, tp=2)  # workers 0 1 / 2 3
        ...     return mesh.shape, mesh.coordinates, mesh["dp"].workers, mesh["tp"].workers
        >>> linop.launch(program, workers=4)[2]
        ({'dp': 2, 'tp': 2}, {'dp': 1, 'tp': 0}, (0, 2), (2, 3))
    """

    def __init__(self, backend: Backend | None = None, /, **axes: int) -> None:
        self.backend = program_backend() if backend is None else backend
        if not isinstance(self.backend, Backend):
            raise ArgumentError(f"Mesh: expected a backend, given {backend!r}")
        if self.backend.worker is None:
            raise BackendError(
                f"backend {self.backend.name!r} holds all workers; a mesh is of a program's "
                f"workers: start it by linop.launch, mpiexec or torchrun"
            )
        self.names = tuple(axes)
        workers = self.backend.workers or 1
        extents, said = agreement_of(self.backend).together(
            lambda: (_extents(axes, workers), tuple(axes.items())),
            "Mesh",
            "construct linop.strategies.Mesh",
        )
        for worker, theirs in enumerate(said):
            if theirs != said[0]:
                raise BackendError(
                    f"Mesh: worker {worker} has the axes {dict(theirs)}, worker 0 {dict(said[0])}; "
                    f"the same expected on every worker"
                )
        self.partition = Partition(extents)
        self._known: dict[tuple[str, ...], Axis] = {}

    @property
    def shape(self) -> dict[str, int]:
        """Extents by name."""
        return dict(zip(self.names, self.partition.shape, strict=True))

    @property
    def coordinates(self) -> dict[str, int]:
        """This worker's, by name."""
        at = self.partition.coordinates(self._worker)
        return dict(zip(self.names, at, strict=True))

    @property
    def _worker(self) -> int:
        assert self.backend.worker is not None
        return self.backend.worker

    def __getitem__(self, names: str | tuple[str, ...]) -> Axis:
        key = names if isinstance(names, tuple) else (names,)
        if key not in self._known:
            self._known[key] = self._axis(key)
        return self._known[key]

    def _axis(self, names: Sequence[str]) -> Axis:
        given = ", ".join(map(str, names))
        agreement = agreement_of(self.backend)
        numbers, said = agreement.together(
            lambda: (self._numbers(names), given), "mesh", "make an axis of a mesh"
        )
        for worker, theirs in enumerate(said):
            if theirs != said[0]:
                raise BackendError(
                    f"mesh: worker {worker} makes axis {theirs!r}, worker 0 {said[0]!r}; the same "
                    f"expected on every worker"
                )
        at = self.partition.coordinates(self._worker)
        line = self.partition[
            tuple(slice(None) if k in numbers else c for k, c in enumerate(at))
        ].workers
        part = self.backend.part(line) if isinstance(self.backend, Worker) else self.backend
        extents = tuple(self.partition.shape[k] for k in numbers)
        return Axis(given, line, line.index(self._worker), part, extents)

    def _numbers(self, names: Sequence[str]) -> list[int]:
        numbers = [self.names.index(name) for name in names if name in self.names]
        if len(numbers) < max(1, len(names)) or numbers != sorted({*numbers}):
            given, own = ", ".join(map(str, names)), ", ".join(self.names)
            raise ArgumentError(f"axis {given!r}: some of {own!r}, in this order, expected")
        return numbers

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{name}={n}' for name, n in self.shape.items())})"


def _extents(axes: dict[str, int], workers: int) -> tuple[int, ...]:
    """The extents of a grid of so many workers, -1 replaced."""
    given = [n if n == -1 else integer(n, name) for name, n in axes.items()]
    known = math.prod(n for n in given if n != -1)
    if given.count(-1) == 1 and known > 0:
        given[given.index(-1)] = workers // known
    if not given or min(given) < 1 or math.prod(given) != workers:
        what = " × ".join(f"{name}={n}" for name, n in axes.items()) or "no axes"
        raise ArgumentError(
            f"{what} given, and the backend has {workers} workers; axes expected whose "
            f"extents have that product (one may be -1), or as many workers: linop.launch(main, "
            f"workers=…), mpiexec -n …"
        )
    return tuple(given)
