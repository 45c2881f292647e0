"""Edges of a pipeline as operators: the output of a stage repartitioned to the workers of another
one, and the gradient back by the adjoint. Several plans of one operator are the slots of an edge:
as many messages may be on their way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linop.backends import Backend, BoundPlan
from linop.backends.autograd.dtypes import torch_dtype
from linop.backends.autograd.ports import Port
from linop.backends.engine.arrays.arguments import held
from linop.backends.engine.worker_plan import WorkerPlan
from linop.operators.collectives import repartition
from linop.operators.operator import LinearOperator
from linop.spaces.decomposition import COPIES, REPLICATED
from linop.spaces.partition import Partition
from linop.spaces.tensor import TensorSpace


class Moved(NamedTuple):
    """A tensor between stages."""

    space: TensorSpace
    """Of its blocks; of booleans, as bytes."""
    dtype: Any
    """torch's."""
    number: bool = False
    """True for a tensor without dimensions, which travels as one of one element."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        return () if self.number else self.space.global_shape

    def block(self, worker: int) -> tuple[int, ...]:
        """Shape of a worker's block."""
        return () if self.number else self.space.local_shape(worker)

    @property
    def has_gradient(self) -> bool:
        """False for whole numbers and booleans."""
        return bool(self.dtype.is_floating_point or self.dtype.is_complex)

    def on(self, grid: Partition) -> Moved:
        """The same tensor in balanced blocks on another grid."""
        X = self.space
        same = X.partition == grid
        return self if same else self._replace(space=TensorSpace(X.global_shape, grid, X.dtype))


def carrier(dtype: Any) -> Any:
    """torch's dtype of the numbers as which elements travel."""
    return torch.uint8 if dtype is torch.bool else dtype


class Lane:
    """One direction of an edge, for tensors of one shape.

    A receiver has the receives of the next messages posted, one in each slot, unless messages come
    without; so a sender waits only if all slots are taken.

    Args:
        dtype: torch's, of the tensors.
        number: they have no dimensions.
    """

    def __init__(self, plans: Sequence[BoundPlan], dtype: Any, number: bool = False) -> None:
        first, self._number = plans[0], number
        self._seen = dtype if carrier(dtype) is not dtype else None
        backend, dtype = first.backend, torch_dtype(first.op.dtype)
        self._plans = plans
        for plan in plans:
            if isinstance(plan, WorkerPlan):
                plan.compares = False  # the workers agreed on the whole schedule
        self._into, self._out_of = (
            [Port(backend, region, dtype) for region in held(space, backend.worker)]
            for space in (first.domain, first.codomain)
        )
        self._place: dict[int, int] = {}
        self._order: Sequence[int] = ()
        self._posts = True

    def warm_up(self) -> None:
        """Call every plan once, which binds it. Collective over the workers of the edge."""
        if self._into or self._out_of:
            for plan in self._plans:
                plan(self._into[0].array(self._into[0].zeros()) if self._into else None)
        # A call is 10 µs less than `start` and `finish`.
        self._posts = not all(plan.receives_early for plan in self._plans)

    def open(self, order: Sequence[int]) -> None:
        """Begin a step.

        Args:
            order: micro-batches whose messages come, in the order of the receives.
        """
        if order is not self._order:
            self._order = order
            self._place = {m: k for k, m in enumerate(order)}
        if self._out_of and self._posts:
            for plan, _ in zip(self._plans, order, strict=False):
                plan.start()

    def send(self, micro_batch: int, tensor: Tensor) -> None:
        """Send this worker's block of a micro-batch's tensor. It may wait for a slot."""
        if self._number:
            tensor = tensor.reshape(1)
        if self._seen is not None:
            tensor = tensor.view(carrier(self._seen))
        self._plan(micro_batch)(self._into[0].array(tensor))

    def receive(self, micro_batch: int) -> Tensor:
        """This worker's block of a micro-batch's tensor, in memory of its own; wait for it."""
        plan = self._plan(micro_batch)
        tensor: Tensor = self._out_of[0].tensor(
            plan.finish() if self._posts else plan.in_any_order()
        )
        if self._posts and self._place[micro_batch] + len(self._plans) < len(self._order):
            plan.start()
        if self._number:
            tensor = tensor.reshape(())
        return tensor if self._seen is None else tensor.view(self._seen)

    def fail(self, error: BaseException) -> None:
        """End the other workers' waits for this one, whose step failed."""
        for plan in self._plans:
            if self._into or self._out_of:
                plan.fail(error)

    def _plan(self, micro_batch: int) -> BoundPlan:
        return self._plans[self._place[micro_batch] % len(self._plans)]


class BackLane(Lane):
    """The way back of an edge: gradients, each with a number that says how many workers have one.

    "No gradient" is told apart from a gradient of zeros, for optimizers move parameters with
    gradients of zeros, and leave those without. A worker without one beside others with one sends
    zeros, and all receivers get a gradient, or none does.

    Args:
        flags: as many plans as there are of gradients, from the workers of one stage to those of
            the other.
    """

    def __init__(
        self, plans: Sequence[BoundPlan], dtype: Any, flags: Sequence[BoundPlan], number: bool
    ) -> None:
        super().__init__(plans, dtype, number)
        self._flags = Lane(flags, torch.float64)

    def warm_up(self) -> None:
        super().warm_up()
        self._flags.warm_up()

    def open(self, order: Sequence[int]) -> None:
        super().open(order)
        self._flags.open(order)

    def send(self, micro_batch: int, tensor: Tensor | None) -> None:
        """Send this worker's block of a micro-batch's gradient, or None. It may wait for a slot."""
        flag = torch.full((1,), float(tensor is not None), dtype=torch.float64)
        self._flags.send(micro_batch, flag)
        super().send(micro_batch, self._into[0].zeros() if tensor is None else tensor)

    def receive(  # type: ignore[override]  # None: no gradient
        self, micro_batch: int
    ) -> Tensor | None:
        """This worker's block of a micro-batch's gradient, or None; wait for it."""
        there = self._flags.receive(micro_batch).item()
        tensor = super().receive(micro_batch)
        return tensor if there else None

    def fail(self, error: BaseException) -> None:
        super().fail(error)
        self._flags.fail(error)


def _counting(sender: Partition, receiver: Partition) -> LinearOperator:
    """Sum of a number of each sender, which all receivers get."""
    everywhere = TensorSpace((1,), receiver, axes=[REPLICATED] * receiver.ndim)
    each = TensorSpace((1,), sender, axes=[COPIES] * sender.ndim)
    return repartition(everywhere, each).H


class Edge:
    """Both directions of an edge: compiled by all workers of the backend, in one order.

    Args:
        X: the tensor on the workers of its stage.
        grid: workers of the other stage.
        slots: numbers of slots, forward and back; none back in a table of forwards alone.

    Attributes:
        back: None for tensors that have no gradient.
    """

    def __init__(self, backend: Backend, X: Moved, grid: Partition, slots: tuple[int, int]) -> None:
        op = X.space, X.on(grid).space
        count = max(slots) if X.has_gradient else slots[0]
        plans = [backend.compile(repartition(*op)) for _ in range(count)]
        self.forward = Lane(plans[: slots[0]], X.dtype, X.number)
        self.back: BackLane | None = None
        if X.has_gradient and slots[1]:
            counting = _counting(grid, X.space.partition)
            flags = [backend.compile(counting) for _ in range(slots[1])]
            back = [plan.H for plan in plans[: slots[1]]]
            self.back = BackLane(back, X.dtype, flags, X.number)
        for lane in self.lanes:
            lane.warm_up()

    @property
    def lanes(self) -> list[Lane]:
        """Forward, and back if there is one."""
        return [self.forward] if self.back is None else [self.forward, self.back]
