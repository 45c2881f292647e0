"""Edges of a pipeline as operators: the output of a stage repartitioned to the workers of another
one, and the gradient back by the adjoint. Several plans of one operator are the slots of an edge:
as many messages may be on their way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from linop.backends import Backend, BoundPlan
from linop.backends.arrays.arguments import held
from linop.backends.autograd.dtypes import torch_dtype
from linop.backends.autograd.ports import Port
from linop.backends.worker_plan import WorkerPlan
from linop.operators.collectives import repartition
from linop.spaces.tensor import TensorSpace

Tensor = Any
"""torch is not typed here."""


def fail(plan: BoundPlan, error: BaseException) -> None:
    """End other workers' waits in a plan for this worker, whose step failed."""
    if isinstance(plan, WorkerPlan):
        plan.fail(error)


class Lane:
    """One direction of an edge, for tensors of one shape.

    A receiver has the receives of the next messages posted, one in each slot, unless messages come
    without; so a sender waits only if all slots are taken.
    """

    def __init__(self, plans: Sequence[BoundPlan]) -> None:
        first = plans[0]
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
        self._order = order
        self._place = {m: k for k, m in enumerate(order)}
        if self._out_of and self._posts:
            for plan, _ in zip(self._plans, order, strict=False):
                plan.start()

    def send(self, micro_batch: int, tensor: Tensor) -> None:
        """Send this worker's block of a micro-batch's tensor. It may wait for a slot."""
        self._plan(micro_batch)(self._into[0].array(tensor))

    def receive(self, micro_batch: int) -> Tensor:
        """This worker's block of a micro-batch's tensor, in memory of its own; wait for it."""
        plan = self._plan(micro_batch)
        if not self._posts:
            return self._out_of[0].tensor(plan.in_any_order())
        tensor = self._out_of[0].tensor(plan.finish())
        if self._place[micro_batch] + len(self._plans) < len(self._order):
            plan.start()
        return tensor

    def fail(self, error: BaseException) -> None:
        """End the other workers' waits for this one, whose step failed."""
        for plan in self._plans:
            if self._into or self._out_of:
                fail(plan, error)

    def _plan(self, micro_batch: int) -> BoundPlan:
        return self._plans[self._place[micro_batch] % len(self._plans)]


class Edge:
    """Both directions of an edge: compiled by all workers of the backend, in one order.

    Args:
        X, Y: the tensor on the workers of the two stages.
        slots: numbers of slots, forward and back.
    """

    def __init__(
        self, backend: Backend, X: TensorSpace, Y: TensorSpace, slots: tuple[int, int]
    ) -> None:
        plans = [repartition(X, Y).compile(backend) for _ in range(max(slots))]
        self.forward = Lane(plans[: slots[0]])
        self.back = Lane([plan.H for plan in plans[: slots[1]]])
        for lane in (self.forward, self.back):
            lane.warm_up()
