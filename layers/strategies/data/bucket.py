"""Flat tensors of many tensors: a bucket is one argument of one plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from linop.backends import Backend
from linop.backends.autograd.ports import Port
from linop.backends.engine.arrays.arguments import held
from linop.operators.operator import LinearOperator

MEBIBYTE = 2**20


def grouped(tensors: Sequence[Tensor], cap: float) -> list[list[int]]:
    """Tensors by number, in groups of one dtype and, unless one is larger, of so many bytes."""
    groups: list[list[int]] = []
    open_: dict[Any, tuple[list[int], float]] = {}
    for k, tensor in enumerate(tensors):
        size = tensor.numel() * tensor.element_size()
        group, filled = open_.get(tensor.dtype, ([], 0.0))
        if not group or filled + size > cap:
            group, filled = [], 0.0
            groups.append(group)
        group.append(k)
        open_[tensor.dtype] = group, filled + size
    return groups


class Flat:
    """A plan of flat tensors, called with tensors one after the other in memory.

    Args:
        op: from flat tensors to flat tensors.
    """

    def __init__(self, op: LinearOperator, backend: Backend, dtype: Any) -> None:
        self.plan = backend.compile(op)
        self._into, self._out_of = (
            [Port(backend, region, dtype) for region in held(space, backend.worker)]
            for space in (op.domain, op.codomain)
        )

    def start(self, x: Tensor | None) -> None:
        """Start a run; x must not change before `finish`."""
        self.plan.start(self._array(x))

    def finish(self) -> Tensor | None:
        """The result of the run; None on a worker without one."""
        return self._tensor(self.plan.finish())

    def __call__(self, x: Tensor | None) -> Tensor | None:
        return self._tensor(self.plan(self._array(x)))

    def fail(self, error: BaseException) -> None:
        """End the other workers' waits for this one."""
        self.plan.fail(error)

    def _array(self, x: Tensor | None) -> Any:
        return self._into[0].array(x) if self._into else None

    def _tensor(self, y: Any) -> Tensor | None:
        return self._out_of[0].tensor(y) if self._out_of else None


class Layout:
    """Positions of tensors that are one after the other in a flat one."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._sizes, self._shapes = [t.numel() for t in tensors], [t.shape for t in tensors]
        self.size = sum(self._sizes)

    def views(self, flat: Tensor) -> list[Tensor]:
        """Parts of a flat tensor in the tensors' shapes."""
        parts = zip(flat.split(self._sizes), self._shapes, strict=True)
        return [part.view(shape) for part, shape in parts]
