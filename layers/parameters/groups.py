"""Groups of workers that the parameters of a model are cut over: one; or lines of a mesh, such as
its tensor-parallel workers and those that shard their blocks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any

from linop.backends import Backend
from linop.backends.together.meeting import Failure, Meeting
from linop.backends.together.transport import MEET, Item
from linop.errors import ArgumentError, LinopError
from linop.layers.agreement.input_agreement import agreement_of
from linop.layers.parameters.blocks import blocks


class Groups(Meeting):
    """The product of some groups of workers: the workers of a mesh that differ along their axes
    alone. They have numbers in row-major order, of which the last group varies fastest.

    Args:
        backends: of this worker's groups; those whose blocks are cut again come first.

    Attributes:
        at: this worker's number in each group.
    """

    def __init__(self, backends: Sequence[Backend]) -> None:
        self.backends = tuple(backends)
        self._sizes = [backend.workers or 1 for backend in self.backends]
        self.workers = math.prod(self._sizes)
        self.at = tuple(backend.worker or 0 for backend in self.backends)
        self.worker = 0
        for size, k in zip(self._sizes, self.at, strict=True):
            self.worker = self.worker * size + k

    def coordinates(self, worker: int) -> tuple[int, ...]:
        """The number of a worker in each group."""
        found = []
        for size in reversed(self._sizes):
            worker, k = divmod(worker, size)
            found.append(k)
        return tuple(reversed(found))

    def gather_objects(self, mine: Item, doing: str = MEET, about: str = "") -> list[Item]:
        said: Any = [mine]
        problem: LinopError | None = None
        for backend in reversed(self.backends):
            try:
                lines = agreement_of(backend).gather_objects(said, doing, about)
            except LinopError as error:
                # The lines across this one are told, and do not wait.
                problem = problem or error
                said = Failure.of(problem)
                continue
            failed = next((line for line in lines if isinstance(line, Failure)), None)
            said = failed or [one for line in lines for one in line]
        if isinstance(said, Failure):
            raise problem or said.error
        return [*said]


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
    axes: dict[Backend, Any]
    axes = {backend: getattr(holder, "axis", None) for backend, holder in found.items()}
    lines = [getattr(axis, "workers", ()) for axis in axes.values()]
    if not all(len({*one} & {*other}) == 1 for one, other in combinations(lines, 2)):
        raise ArgumentError(
            "parameters that are cut over different groups of workers; those of one group "
            "expected, or of axes of one mesh"
        )

    def order(backend: Backend) -> tuple[bool, str]:
        return getattr(found[backend], "shards_blocks", False), axes[backend].name

    return Groups(sorted(found, key=order))
