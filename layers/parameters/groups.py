"""Groups of workers that the parameters of a model are cut over: one; or lines of a mesh, such as
its tensor-parallel workers, those that shard their blocks, and those that share experts."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from linop.backends import Backend
from linop.backends.together.meeting import Failure, Meeting
from linop.backends.together.transport import MEET, Item
from linop.errors import ArgumentError, LinopError
from linop.layers.agreement.input_agreement import agreement_of
from linop.layers.parameters.blocks import blocks


class Step(NamedTuple):
    """An axis of a mesh: the distance of neighbours' numbers, and the number of workers."""

    distance: int
    extent: int


class Groups(Meeting):
    """All workers that some groups reach, one after the other: those of a mesh that differ along
    the groups' axes alone. They have numbers in row-major order, as in the mesh. Groups may have
    axes in common: experts are cut over one axis, and all other parameters over it and another.

    Args:
        backends: of this worker's groups; those whose blocks are cut again come first.
        axes: of each group, outermost first; by default there is one group, with an axis of its
            own.

    Attributes:
        backends: the given ones.
        ways: those that suffice to reach all workers, in the same order.
        worker, workers: this worker's number, and how many there are.
    """

    def __init__(
        self, backends: Sequence[Backend], axes: Mapping[Backend, Sequence[Step]] | None = None
    ) -> None:
        self.backends = tuple(backends)
        if axes is None:
            (backend,) = self.backends
            axes = {backend: [Step(1, backend.workers or 1)]}
        self._axes = {backend: tuple(axes[backend]) for backend in self.backends}
        self._every = sorted({step for some in self._axes.values() for step in some}, reverse=True)
        self.workers = math.prod(step.extent for step in self._every)
        here: dict[Step, int] = {}
        for backend, some in self._axes.items():
            here |= _coordinates(some, backend.worker or 0)
        self.worker = _number(self._every, here)
        self.ways = self._ways()

    def _ways(self) -> tuple[Backend, ...]:
        """Large groups first, so that those inside of them are not needed."""
        reached: set[Step] = set()
        found: set[Backend] = set()
        for backend in sorted(self.backends, key=lambda one: -(one.workers or 1)):
            if not reached.issuperset(self._axes[backend]) or not found:
                found.add(backend)
                reached.update(self._axes[backend])
        return tuple(backend for backend in self.backends if backend in found)

    @property
    def are_apart(self) -> bool:
        """True if no axis is in two of the groups."""
        return math.prod(backend.workers or 1 for backend in self.backends) == self.workers

    def place(self, backends: Collection[Backend]) -> tuple[int | None, ...]:
        """This worker's number in each group; None in those that are not among some groups: equal
        on workers that have copies of what these cut."""
        return tuple(b.worker or 0 if b in backends else None for b in self.backends)

    def at(self, backend: Backend, worker: int) -> int:
        """The number of a worker in its line of a group."""
        return _number(self._axes[backend], _coordinates(self._every, worker))

    def cover(self, backends: Iterable[Backend]) -> bool:
        """True if some groups reach all workers: then what is cut over them has no copies."""
        return self._of(backends) >= {*self._every}

    def differ_in(self, backends: Iterable[Backend], worker: int) -> bool:
        """True if a worker differs from this one along the axes of some groups at most."""
        mine, theirs = (_coordinates(self._every, one) for one in (self.worker, worker))
        inside = self._of(backends)
        return all(mine[step] == theirs[step] for step in self._every if step not in inside)

    def _of(self, backends: Iterable[Backend]) -> set[Step]:
        return {step for backend in backends for step in self._axes.get(backend, ())}

    def gather_objects(self, mine: Item, doing: str = MEET, about: str = "") -> list[Item]:
        said: Any = {self.worker: mine}
        problem: LinopError | None = None
        for backend in reversed(self.ways):
            try:
                lines = agreement_of(backend).gather_objects(said, doing, about)
            except LinopError as error:
                # The lines across this one are told, and do not wait.
                problem = problem or error
                said = Failure.of(problem)
                continue
            failed = next((line for line in lines if isinstance(line, Failure)), None)
            said = failed or {worker: one for line in lines for worker, one in line.items()}
        if isinstance(said, Failure):
            raise problem or said.error
        return [said[worker] for worker in range(self.workers)]


def groups_of(tensors: Iterable[Any], otherwise: Backend) -> Groups:
    """The groups of workers that have the blocks among some tensors.

    Args:
        otherwise: the backend for tensors of which none is a block.

    Raises:
        ArgumentError: they are no lines of one mesh.
    """
    tensors = list(tensors)
    known = blocks(tensors)
    found: dict[Backend, Any] = {}
    for block in (one for t in tensors for one in known.get(id(t), ())):
        found.setdefault(block.layer.backend, block.layer)
    if len(found) < 2:
        return Groups([*found] or [otherwise])
    lines: dict[Backend, Any]
    lines = {backend: getattr(holder, "axis", None) for backend, holder in found.items()}
    steps = {backend: _steps(line) for backend, line in lines.items()}
    if not _of_one_mesh(lines.values(), steps.values()):
        each = sorted(_described(holder, lines[backend]) for backend, holder in found.items())
        raise ArgumentError(
            f"parameters that are cut over different groups of workers ({'; '.join(each)}); those "
            f"of one group expected, or of axes of one mesh"
        )

    def order(backend: Backend) -> tuple[bool, str]:
        return getattr(found[backend], "shards_blocks", False), lines[backend].name

    return Groups(sorted(found, key=order), steps)


def _steps(line: Any) -> list[Step]:
    """The axes of a mesh that a `linop.strategies.mesh.Axis` joins, outermost first."""
    if line is None:
        return []
    found, each = [], len(line.workers)
    for extent in line.extents or (each,):
        each //= extent
        if extent > 1:
            found.append(Step(line.workers[each] - line.workers[0], extent))
    return found


def _of_one_mesh(lines: Iterable[Any], steps: Iterable[Sequence[Step]]) -> bool:
    """True of lines through one worker, whose axes are the same or independent."""
    lines = list(lines)
    if any(line is None for line in lines):
        return False
    every = sorted({step for some in steps for step in some})
    apart = all(b.distance % (a.distance * a.extent) == 0 for a, b in pairwise(every))
    return apart and len({line.workers[line.index] for line in lines}) == 1


def _described(holder: Any, line: Any) -> str:
    if line is None:
        return f"those of a {getattr(holder, 'kind', type(holder).__name__)}, by no axis of a mesh"
    return f"{line.name!r}: workers {', '.join(map(str, line.workers))}"


def _coordinates(axes: Sequence[Step], worker: int) -> dict[Step, int]:
    """Coordinates of a number in row-major order."""
    found = {}
    for step in reversed(axes):
        worker, found[step] = divmod(worker, step.extent)
    return found


def _number(axes: Sequence[Step], at: Mapping[Step, int]) -> int:
    found = 0
    for step in axes:
        found = found * step.extent + at[step]
    return found
