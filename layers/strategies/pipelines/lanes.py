"""Edges of a pipeline as operators: the output of a stage repartitioned to the workers of another
one, and the gradient back by the adjoint. Several plans of one operator are the slots of an edge:
as many messages may be on their way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linop.backends import Backend, BoundPlan
from linop.backends.autograd.dtypes import torch_dtype
from linop.backends.autograd.ports import Port
from linop.backends.engine.arrays.arguments import held
from linop.operators.algebra import direct_sum
from linop.operators.collectives import repartition
from linop.operators.operator import LinearOperator
from linop.spaces.decomposition import COPIES, REPLICATED
from linop.spaces.partition import Partition
from linop.spaces.scalars import Array
from linop.spaces.tensor import TensorSpace

Send = Callable[[Any], Any]
"""Of a tensor, or of None."""
Receive = Callable[[], Any]


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
    """One direction of an edge, for tensors of one shape: message k of a step is in slot k modulo
    their number.

    A receiver has the receives of the next messages posted, one in each slot, unless messages come
    without; so a sender waits only if all slots are taken.

    Args:
        dtype: torch's, of the tensors.
        number: they have no dimensions.

    Attributes:
        posts: True if this worker posts receives: steps begin with `open` then.
    """

    def __init__(self, plans: Sequence[BoundPlan], dtype: Any, number: bool = False) -> None:
        first, self._number = plans[0], number
        self._seen = dtype if carrier(dtype) is not dtype else None
        backend, dtype = first.backend, torch_dtype(first.op.dtype)
        self._plans = plans
        for plan in plans:
            plan.in_any_order()  # the workers agreed on the whole schedule
        self._into, self._out_of = (
            [Port(backend, region, dtype) for region in held(space, backend.worker)]
            for space in (first.domain, first.codomain)
        )
        self.posts = bool(self._out_of)

    def warm_up(self) -> None:
        """Call every plan once, which binds it. Collective over the workers of the edge."""
        if self._into or self._out_of:
            for plan in self._plans:
                plan(self._zeros() if self._into else None)
        # A call is 10 µs less than `start` and `finish`.
        self.posts = self.posts and not all(plan.receives_early for plan in self._plans)

    def _zeros(self) -> Any:
        """An argument of the plans."""
        return self._into[0].array(self._into[0].zeros())

    def open(self, count: int) -> None:
        """Begin a step of so many messages: post the first receives."""
        for plan in self._plans[:count]:
            plan.start()

    def sending(self, k: int) -> Send:
        """Function that sends this worker's block of a tensor as message k of a step. It may wait
        for a slot."""
        plan, array, sent = self._plan(k), self._into[0].array, self._sent
        if self._is_plain:
            return lambda tensor: plan(array(tensor))
        return lambda tensor: plan(array(sent(tensor)))

    def receiving(self, k: int, count: int) -> Receive:
        """Function that waits for message k of a step of `count`, and returns this worker's block
        of its tensor, in memory of its own."""
        come, made = self._coming(k, count), self._made
        return lambda: made(come())

    def _plan(self, k: int) -> BoundPlan:
        return self._plans[k % len(self._plans)]

    def _coming(self, k: int, count: int) -> Callable[[], Any]:
        """Function that waits for a message: the plan's result."""
        plan = self._plan(k)
        if not self.posts:
            return plan
        if k + len(self._plans) >= count:  # no message of this step comes in the slot
            return plan.finish

        def come() -> Any:
            result = plan.finish()
            plan.start()
            return result

        return come

    @property
    def _is_plain(self) -> bool:
        """True if tensors travel as they are."""
        return not self._number and self._seen is None

    def _sent(self, tensor: Tensor) -> Tensor:
        """A tensor as it travels."""
        if self._number:
            tensor = tensor.reshape(1)
        return tensor if self._seen is None else tensor.view(carrier(self._seen))

    @property
    def _made(self) -> Callable[[Array], Tensor]:
        """Function of an array that has come: its tensor."""
        made, seen = self._out_of[0].tensor, self._seen
        if self._is_plain:
            return made

        def as_sent(array: Array) -> Tensor:
            tensor: Tensor = made(array)
            if self._number:
                tensor = tensor.reshape(())
            return tensor if seen is None else tensor.view(seen)

        return as_sent

    def fail(self, error: BaseException) -> None:
        """End the other workers' waits for this one, whose step failed."""
        for plan in self._plans:
            if self._into or self._out_of:
                plan.fail(error)


class BackLane(Lane):
    """The way back of an edge: gradients, each with a number that says how many workers have one.

    "No gradient" is told apart from a gradient of zeros, for optimizers move parameters with
    gradients of zeros, and leave those without. A worker without one beside others with one sends
    zeros, and all receivers get a gradient, or none does.

    Args:
        plans: of the direct sum of a gradient and a number, from the workers of one stage to those
            of the other.
    """

    def __init__(self, plans: Sequence[BoundPlan], dtype: Any, number: bool) -> None:
        super().__init__(plans, dtype, number)
        self._names = [port.name for port in self._into or self._out_of]
        self._counts = [
            self._into[1].array(torch.full_like(self._into[1].zeros(), n))
            for n in (0, 1)
            if self._into
        ]

    def _zeros(self) -> Any:
        return {port.name: port.array(port.zeros()) for port in self._into}

    def sending(self, k: int) -> Send:
        """`Lane.sending`; of None, that there is no gradient."""
        plan, port, (name, counted) = self._plan(k), self._into[0], self._names
        none, some = self._counts

        array, sent = port.array, None if self._is_plain else self._sent

        def send(tensor: Tensor | None) -> None:
            if tensor is None:
                plan({name: array(port.zeros()), counted: none})
            else:
                plan({name: array(tensor if sent is None else sent(tensor)), counted: some})

        return send

    def receiving(self, k: int, count: int) -> Receive:
        """`Lane.receiving`; None if there is no gradient."""
        come, made, (name, counted) = self._coming(k, count), self._made, self._names

        def receive() -> Tensor | None:
            received = come()
            there, tensor = received[counted].item(), made(received[name])
            return tensor if there else None

        return receive


def _counting(sender: Partition, receiver: Partition, dtype: Any) -> LinearOperator:
    """Sum of a number of each sender, which all receivers get."""
    everywhere = TensorSpace((1,), receiver, dtype, [REPLICATED] * receiver.ndim, "count")
    each = TensorSpace((1,), sender, dtype, [COPIES] * sender.ndim, "count")
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
        op = repartition(X.space, X.on(grid).space)
        plans = [backend.compile(op) for _ in range(slots[0])]
        self.forward = Lane(plans, X.dtype, X.number)
        self.back: BackLane | None = None
        if X.has_gradient and slots[1]:
            both = direct_sum(op.H, _counting(grid, X.space.partition, X.space.dtype))
            back = [backend.compile(both) for _ in range(slots[1])]
            self.back = BackLane(back, X.dtype, X.number)
        for lane in self.lanes:
            lane.warm_up()

    @property
    def lanes(self) -> list[Lane]:
        """Forward, and back if there is one."""
        return [self.forward] if self.back is None else [self.forward, self.back]
