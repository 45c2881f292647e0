"""One worker's part of one step: its actions of the schedule, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from linop.caching import cached_property
from linop.schedules import Action, Kind, Schedule
from linop.strategies.pipelines.forms import Leaf, Output
from linop.strategies.pipelines.lanes import Edge, Lane
from linop.strategies.pipelines.stages.stage import Stage

Pair = tuple[int, int]
"""The stages of an edge."""


@dataclass(frozen=True)
class Graph:
    """Edges between stages.

    Attributes:
        outputs: for each pair of stages with an edge, the first one lower, the outputs that go
            along it: by number, ascending, then by name.
        place: row of the schedule, by stage.
    """

    outputs: Mapping[Pair, Sequence[Output]]
    place: Mapping[int, int]

    @property
    def edges(self) -> list[Pair]:
        """Pairs of stages."""
        return list(self.outputs)

    def taken(self, stage: int) -> list[Output]:
        """Outputs of a stage that others take: by number, ascending, then by name."""
        return ordered({k for (a, _), ks in self.outputs.items() if a == stage for k in ks})

    @cached_property
    def sources(self) -> dict[int, list[int]]:
        """For each stage, those whose output it takes, ascending."""
        return {s: sorted(a for a, b in self.edges if b == s) for s in self.place}

    @cached_property
    def sinks(self) -> dict[int, list[int]]:
        """For each stage, those that take its output, descending: in this order a single process's
        backward adds their gradients."""
        return {s: sorted((b for a, b in self.edges if a == s), reverse=True) for s in self.place}

    @property
    def crossing(self) -> list[Pair]:
        """Edges between different rows of the schedule."""
        return [(a, b) for a, b in self.edges if self.place[a] != self.place[b]]


def ordered(outputs: Iterable[Output]) -> list[Output]:
    """Outputs by number, ascending, then by name."""
    return sorted(outputs, key=lambda k: (isinstance(k, str), k))


Key = tuple[int, int, int]
"""Source, target and micro-batch."""


class Computation(NamedTuple):
    """Of a stage, for a micro-batch.

    Attributes:
        version: of the parameters; -1 for the newest.
        sources: edges into the stage, and the number of tensors that come along each.
        sinks: edges out of it, and the tensors of its outputs that go along each.
    """

    stage: Stage
    micro_batch: int
    version: int
    sources: Sequence[tuple[Key, int]]
    sinks: Sequence[tuple[Key, Sequence[Leaf]]]


class Message(NamedTuple):
    """Along an edge: functions that send or receive each of its tensors; None for gradients that
    tensors do not have."""

    key: Key
    tensors: Sequence[Callable[..., Any] | None]


class Actions(NamedTuple):
    """A worker's actions of a step, resolved once for all steps with the same shapes.

    Attributes:
        opened: lanes of which receives are posted first, and the number of their messages.
        row: methods of `Step`, and their arguments.
    """

    opened: Sequence[tuple[Lane, int]]
    row: Sequence[tuple[Callable[[Step, Any], None], Computation | Message]]


@dataclass
class Step:
    """One worker's step.

    Args:
        inputs: function of a micro-batch, for the first stage's worker: its tensors.
        loss: function of micro-batch and output, for the last stage's worker; None on others, and
            to evaluate.
        update: applies the gradients of a stage.
    """

    inputs: Callable[[int], list[Tensor]]
    loss: Callable[[int, Tensor], Tensor] | None
    update: Callable[[Stage], None]
    outputs: dict[int, Any] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)
    _forward: dict[Key, Sequence[Tensor]] = field(default_factory=dict)
    """Outputs: received, or to be sent."""
    _back: dict[Key, Sequence[Tensor | None]] = field(default_factory=dict)
    """Gradients of outputs; None for whole numbers."""

    def run(self, actions: Actions) -> None:
        """Execute the actions of this worker."""
        for lane, count in actions.opened:
            lane.open(count)
        for run, given in actions.row:
            run(self, given)

    def _inputs(self, action: Computation) -> list[Tensor]:
        if not action.sources:
            return self.inputs(action.micro_batch)
        return [x for key, _ in action.sources for x in self._forward.pop(key)]

    def _run_forward(self, action: Computation) -> None:
        stage, m, version, sources, sinks = action
        inputs, loss = self._inputs(action), self.loss
        if sources:
            for x in inputs:
                if x.is_floating_point() or x.is_complex():
                    x.requires_grad_()
        if sinks:
            self._spread(action, stage.forward(m, inputs, version))
        else:
            assert loss is not None
            self.losses[m] = stage.forward_loss(m, inputs, version, loss)

    def _evaluate(self, action: Computation) -> None:
        outputs, result = action.stage.evaluate(action.micro_batch, self._inputs(action))
        if not action.sinks:
            self.outputs[action.micro_batch] = result
        self._spread(action, outputs)

    def _spread(self, action: Computation, outputs: Mapping[Leaf, Tensor]) -> None:
        """Keep outputs for the stages that take them."""
        for key, leaves in action.sinks:
            self._forward[key] = [outputs[k] for k in leaves]

    def _run_backward(self, action: Computation) -> None:
        gradients = self._gradients(action)
        self._give_back(action, action.stage.backward(action.micro_batch, gradients))

    def _run_backward_input(self, action: Computation) -> None:
        gradients = self._gradients(action)
        self._give_back(action, action.stage.backward_input(action.micro_batch, gradients))

    def _gradients(self, action: Computation) -> dict[Leaf, Tensor] | None:
        """Gradients of tensors of a stage's outputs; None for the loss."""
        if not action.sinks:
            return None
        gradients: dict[Leaf, Tensor] = {}
        for key, leaves in action.sinks:
            for k, one in zip(leaves, self._back.pop(key), strict=True):
                if one is not None:
                    gradients[k] = gradients[k] + one if k in gradients else one
        return gradients

    def _give_back(self, action: Computation, gradients: Sequence[Tensor | None]) -> None:
        """Keep gradients of a stage's inputs for the stages that they come from."""
        start = 0
        for key, count in action.sources:
            self._back[key] = gradients[start : start + count]
            start += count

    def _run_backward_weight(self, action: Computation) -> None:
        action.stage.backward_weight(action.micro_batch)

    def _update(self, action: Computation) -> None:
        self.update(action.stage)

    def _unshard(self, action: Computation) -> None:
        action.stage.unshard()

    def _reshard(self, action: Computation) -> None:
        action.stage.reshard()

    def _reduce(self, action: Computation) -> None:
        action.stage.reduce()

    def _send_forward(self, message: Message) -> None:
        for send, y in zip(message.tensors, self._forward.pop(message.key), strict=True):
            assert send is not None
            send(y)

    def _receive_forward(self, message: Message) -> None:
        self._forward[message.key] = [receive() for receive in message.tensors if receive]

    def _send_back(self, message: Message) -> None:
        for send, gradient in zip(message.tensors, self._back.pop(message.key), strict=True):
            if send is not None:
                send(gradient)

    def _receive_back(self, message: Message) -> None:
        self._back[message.key] = [receive and receive() for receive in message.tensors]


_RUN: Mapping[Kind, Callable[[Step, Any], None]] = {
    Kind.FORWARD: Step._run_forward,
    Kind.BACKWARD: Step._run_backward,
    Kind.BACKWARD_INPUT: Step._run_backward_input,
    Kind.BACKWARD_WEIGHT: Step._run_backward_weight,
    Kind.SEND_F: Step._send_forward,
    Kind.RECV_F: Step._receive_forward,
    Kind.SEND_B: Step._send_back,
    Kind.RECV_B: Step._receive_back,
    Kind.UPDATE: Step._update,
    Kind.UNSHARD: Step._unshard,
    Kind.RESHARD: Step._reshard,
    Kind.REDUCE_GRAD: Step._reduce,
}
_MESSAGES = Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B
Edges = Sequence[Mapping[Pair, Sequence[Edge]]]
"""The compiled edges of each micro-batch, one for each tensor that goes along them."""
Orders = Mapping[int, tuple[Lane, Sequence[int]]]
"""Lanes by their `id`, and the micro-batches that come through each, in order."""


class Resolver:
    """Actions of a table, for micro-batches of some shapes.

    Args:
        graph: of the pipeline.
        stages: of this worker.
        edges: those between workers.
        leaves: of each micro-batch, the tensors that go along each edge.
        orders: of all lanes.
        trains: False: forwards are evaluations.
    """

    def __init__(
        self,
        graph: Graph,
        stages: Mapping[int, Stage],
        edges: Edges,
        leaves: Sequence[Mapping[Pair, Sequence[Leaf]]],
        orders: Orders,
        trains: bool = True,
    ) -> None:
        self._graph, self._stages = graph, stages
        self._edges, self._leaves, self._trains = edges, leaves, trains
        self._orders = orders
        self._place = {
            key: {m: k for k, m in enumerate(order)} for key, (_, order) in orders.items()
        }

    def actions(self, row: Sequence[Action]) -> Actions:
        """A worker's actions, as `Step` runs them."""
        opened = [(lane, len(order)) for lane, order in self._orders.values() if lane.posts]
        return Actions(opened, [self._resolved(action) for action in row])

    def _resolved(
        self, action: Action
    ) -> tuple[Callable[[Step, Any], None], Computation | Message]:
        run = _RUN[action.kind]
        if action.kind in _MESSAGES:
            return run, self._message(action)
        if action.kind == Kind.FORWARD and not self._trains:
            run = Step._evaluate
        return run, self._computation(action)

    def _computation(self, action: Action) -> Computation:
        s, m = action.stage, action.micro_batch
        stage, version = self._stages[s], -1 if action.version is None else action.version
        if m is None:
            return Computation(stage, -1, version, (), ())
        leaves, graph = self._leaves[m], self._graph
        sources = [((a, s, m), len(leaves[a, s])) for a in graph.sources[s]]
        sinks = [((s, b, m), leaves[s, b]) for b in graph.sinks[s]]
        return Computation(stage, m, version, sources, sinks)

    def _message(self, action: Action) -> Message:
        m = action.micro_batch
        assert m is not None
        sends = action.kind in (Kind.SEND_F, Kind.SEND_B)
        found: list[Callable[..., Any] | None] = []
        for lane in _lanes(action, self._edges):
            if lane is None:
                found.append(None)
                continue
            place = self._place[id(lane)]
            k, count = place[m], len(place)
            found.append(lane.sending(k) if sends else lane.receiving(k, count))
        return Message((*_ends(action), m), found)


def _ends(action: Action) -> Pair:
    """The edge of a message: its stages, the first one lower."""
    assert action.other is not None
    ends = action.stage, action.other
    return ends if action.kind in (Kind.SEND_F, Kind.RECV_B) else ends[::-1]


def _lanes(action: Action, edges: Edges) -> list[Lane | None]:
    """The lanes of a message; None for tensors without gradient."""
    assert action.micro_batch is not None
    through = edges[action.micro_batch][_ends(action)]
    if action.kind in (Kind.SEND_F, Kind.RECV_F):
        return [edge.forward for edge in through]
    return [edge.back for edge in through]


def receives(table: Schedule, edges: Edges) -> Orders:
    """Lanes of all edges, and the micro-batches that come through each in a step, in the order of
    the receives; the same on both ends.

    Args:
        table: of all workers, with messages.
    """
    orders: dict[int, tuple[Lane, list[int]]] = {}
    for action in (a for row in table.workers for a in row):
        if action.kind in (Kind.RECV_F, Kind.RECV_B):
            for lane in filter(None, _lanes(action, edges)):
                assert action.micro_batch is not None
                orders.setdefault(id(lane), (lane, []))[1].append(action.micro_batch)
    return orders
