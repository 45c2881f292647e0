"""One worker's part of one step: its actions of the schedule, in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from linop.caching import cached_property
from linop.schedules import Action, Kind, Schedule
from linop.strategies.pipelines.lanes import Edge, Lane
from linop.strategies.pipelines.stage import Stage

Tensor = Any
"""torch is not typed here."""
Pair = tuple[int, int]
"""The stages of an edge."""


@dataclass(frozen=True)
class Graph:
    """Edges between stages.

    Attributes:
        outputs: for each pair of stages with an edge, the first one lower, the numbers of the
            outputs that go along it, ascending.
        place: row of the schedule, by stage.
    """

    outputs: Mapping[Pair, Sequence[int]]
    place: Mapping[int, int]

    @property
    def edges(self) -> list[Pair]:
        """Pairs of stages."""
        return list(self.outputs)

    def taken(self, stage: int) -> list[int]:
        """Numbers of the outputs of a stage that others take, ascending."""
        return sorted({k for (a, _), ks in self.outputs.items() if a == stage for k in ks})

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


@dataclass
class Step:
    """One worker's step.

    Args:
        graph: of the pipeline.
        stages: of this worker.
        edges: the compiled edges of each micro-batch, one for each output that goes along them.
        receives: lanes, and the micro-batches that come through each, in order.
        inputs: the input of each micro-batch, for the first stage's worker.
        loss: function of micro-batch and output, for the last stage's worker; None to evaluate.
        update: applies the gradients of a stage.
    """

    graph: Graph
    stages: Mapping[int, Stage]
    edges: Sequence[Mapping[Pair, Sequence[Edge]]]
    receives: Sequence[tuple[Lane, Sequence[int]]]
    inputs: Sequence[Tensor]
    loss: Callable[[int, Tensor], Tensor] | None
    update: Callable[[Stage], None]
    outputs: dict[int, Any] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)
    _forward: dict[tuple[int, int, int], Sequence[Tensor]] = field(default_factory=dict)
    """Outputs by source, target and micro-batch: received, or to be sent."""
    _back: dict[tuple[int, int, int], Sequence[Tensor]] = field(default_factory=dict)
    """Gradients by source, target and micro-batch of the output; None for whole numbers."""

    def run(self, row: Sequence[Action]) -> None:
        """Execute the actions of this worker."""
        kinds = {
            Kind.FORWARD: self._run_forward if self.loss else self._evaluate,
            Kind.BACKWARD: self._run_backward,
            Kind.BACKWARD_INPUT: self._run_backward,
            Kind.BACKWARD_WEIGHT: self._run_backward_weight,
            Kind.SEND_F: self._send_forward,
            Kind.RECV_F: self._receive_forward,
            Kind.SEND_B: self._send_back,
            Kind.RECV_B: self._receive_back,
            Kind.UPDATE: self._run_update,
            Kind.UNSHARD: lambda action: self.stages[action.stage].unshard(),
            Kind.RESHARD: lambda action: self.stages[action.stage].reshard(),
            Kind.REDUCE_GRAD: lambda action: self.stages[action.stage].reduce(),
        }
        for lane, order in self.receives:
            lane.open(order)
        for action in row:
            kinds[action.kind](action)

    # Computation

    def _inputs(self, action: Action) -> list[Tensor]:
        m = micro_batch(action)
        sources = self.graph.sources[action.stage]
        if not sources:
            return [self.inputs[m]]
        return [x for a in sources for x in self._forward.pop((a, action.stage, m))]

    def _run_forward(self, action: Action) -> None:
        m, stage = micro_batch(action), self.stages[action.stage]
        sinks, loss = self.graph.sinks[action.stage], self.loss
        assert loss is not None
        inner = bool(self.graph.sources[action.stage])
        given = [x.detach() for x in self._inputs(action)]
        inputs = [x.requires_grad_() if inner and has_gradient(x) else x for x in given]
        last = None if sinks else lambda y: loss(m, y)
        outputs, value = stage.forward(m, inputs, action.version, last)
        if value is not None:
            self.losses[m] = value
        self._spread(action.stage, m, outputs)

    def _evaluate(self, action: Action) -> None:
        m = micro_batch(action)
        outputs, result = self.stages[action.stage].evaluate(m, self._inputs(action))
        if not self.graph.sinks[action.stage]:
            self.outputs[m] = result
        self._spread(action.stage, m, outputs)

    def _spread(self, stage: int, m: int, outputs: Mapping[int, Tensor]) -> None:
        """Keep outputs for the stages that take them."""
        for b in self.graph.sinks[stage]:
            self._forward[stage, b, m] = [outputs[k] for k in self.graph.outputs[stage, b]]

    def _run_backward(self, action: Action) -> None:
        m, stage = micro_batch(action), self.stages[action.stage]
        gradients: dict[int, Tensor] = {}
        sinks = self.graph.sinks[action.stage]
        for b in sinks:
            found = self._back.pop((action.stage, b, m))
            for k, one in zip(self.graph.outputs[action.stage, b], found, strict=True):
                if one is not None:
                    gradients[k] = gradients[k] + one if k in gradients else one
        work = stage.backward if action.kind == Kind.BACKWARD else stage.backward_input
        back = iter(work(m, gradients if sinks else None))
        for a in self.graph.sources[action.stage]:
            self._back[a, action.stage, m] = [
                next(back) for _ in self.graph.outputs[a, action.stage]
            ]

    def _run_backward_weight(self, action: Action) -> None:
        self.stages[action.stage].backward_weight(micro_batch(action))

    def _run_update(self, action: Action) -> None:
        self.update(self.stages[action.stage])

    # Messages

    def _send_forward(self, action: Action) -> None:
        m, pair = micro_batch(action), (action.stage, other(action))
        for edge, y in zip(self.edges[m][pair], self._forward.pop((*pair, m)), strict=True):
            edge.forward.send(m, y)

    def _receive_forward(self, action: Action) -> None:
        m, pair = micro_batch(action), (other(action), action.stage)
        self._forward[(*pair, m)] = [edge.forward.receive(m) for edge in self.edges[m][pair]]

    def _send_back(self, action: Action) -> None:
        m, pair = micro_batch(action), (other(action), action.stage)
        for edge, gradient in zip(self.edges[m][pair], self._back.pop((*pair, m)), strict=True):
            if edge.back is not None:
                edge.back.send(m, gradient)

    def _receive_back(self, action: Action) -> None:
        m, pair = micro_batch(action), (action.stage, other(action))
        self._back[(*pair, m)] = [
            edge.back and edge.back.receive(m) for edge in self.edges[m][pair]
        ]


def has_gradient(x: Tensor) -> bool:
    """False for whole numbers and booleans."""
    return bool(x.is_floating_point() or x.is_complex())


def micro_batch(action: Action) -> int:
    """The micro-batch of an action that has one."""
    assert action.micro_batch is not None
    return action.micro_batch


def other(action: Action) -> int:
    """The stage at the other end of a message."""
    assert action.other is not None
    return action.other


def receives(
    table: Schedule, edges: Sequence[Mapping[Pair, Sequence[Edge]]]
) -> list[tuple[Lane, Sequence[int]]]:
    """Lanes of all edges, and the micro-batches that come through each in a step, in the order of
    the receives; the same on both ends.

    Args:
        table: of all workers, with messages.
        edges: the compiled edges of each micro-batch.
    """
    orders: dict[int, tuple[Lane, list[int]]] = {}
    for action in (a for row in table.workers for a in row):
        if action.kind in (Kind.RECV_F, Kind.RECV_B):
            m, forward = micro_batch(action), action.kind == Kind.RECV_F
            ends = action.stage, other(action)
            for edge in edges[m][ends[::-1] if forward else ends]:
                lane = edge.forward if forward else edge.back
                if lane is None:
                    continue
                orders.setdefault(id(lane), (lane, []))[1].append(m)
    return list(orders.values())
