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


class Resolved(NamedTuple):
    """An action; -1 for numbers that it has not."""

    run: Callable[[Step, int, int, int], None]
    """Of its kind."""
    stage: int
    micro_batch: int
    number: int
    """Of messages, the stage at the other end; of forwards, the version of the parameters."""


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


@dataclass
class Step:
    """One worker's step.

    Args:
        graph: of the pipeline.
        stages: of this worker.
        edges: the compiled edges of each micro-batch, one for each tensor that goes along them.
        leaves: of each micro-batch, the tensors that go along each edge.
        receives: lanes, and the micro-batches that come through each, in order.
        inputs: the tensors of each micro-batch, for the first stage's worker.
        loss: function of micro-batch and output, for the last stage's worker; None on others, and
            to evaluate.
        update: applies the gradients of a stage.
    """

    graph: Graph
    stages: Mapping[int, Stage]
    edges: Sequence[Mapping[Pair, Sequence[Edge]]]
    leaves: Sequence[Mapping[Pair, Sequence[Leaf]]]
    receives: Sequence[tuple[Lane, Sequence[int]]]
    inputs: Sequence[Sequence[Tensor]]
    loss: Callable[[int, Tensor], Tensor] | None
    update: Callable[[Stage], None]
    outputs: dict[int, Any] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)
    _forward: dict[tuple[int, int, int], Sequence[Tensor]] = field(default_factory=dict)
    """Outputs by source, target and micro-batch: received, or to be sent."""
    _back: dict[tuple[int, int, int], Sequence[Tensor | None]] = field(default_factory=dict)
    """Gradients by source, target and micro-batch of the output; None for whole numbers."""

    def run(self, row: Sequence[Resolved]) -> None:
        """Execute the actions of this worker."""
        for lane, order in self.receives:
            lane.open(order)
        for run, stage, m, number in row:
            run(self, stage, m, number)

    # Computation: of a stage, a micro-batch, and a version of the parameters

    def _inputs(self, s: int, m: int) -> list[Tensor]:
        sources = self.graph.sources[s]
        if not sources:
            return list(self.inputs[m])
        return [x for a in sources for x in self._forward.pop((a, s, m))]

    def _run_forward(self, s: int, m: int, version: int) -> None:
        inputs, loss = self._inputs(s, m), self.loss
        if self.graph.sources[s]:
            for x in inputs:
                if x.is_floating_point() or x.is_complex():
                    x.requires_grad_()
        if self.graph.sinks[s]:
            self._spread(s, m, self.stages[s].forward(m, inputs, version))
        else:
            assert loss is not None
            self.losses[m] = self.stages[s].forward_loss(m, inputs, version, loss)

    def _evaluate(self, s: int, m: int, version: int) -> None:
        del version
        outputs, result = self.stages[s].evaluate(m, self._inputs(s, m))
        if not self.graph.sinks[s]:
            self.outputs[m] = result
        self._spread(s, m, outputs)

    def _spread(self, s: int, m: int, outputs: Mapping[Leaf, Tensor]) -> None:
        """Keep outputs for the stages that take them."""
        for b in self.graph.sinks[s]:
            self._forward[s, b, m] = [outputs[k] for k in self.leaves[m][s, b]]

    def _run_backward(self, s: int, m: int, number: int) -> None:
        del number
        self._give_back(s, m, self.stages[s].backward(m, self._gradients(s, m)))

    def _run_backward_input(self, s: int, m: int, number: int) -> None:
        del number
        self._give_back(s, m, self.stages[s].backward_input(m, self._gradients(s, m)))

    def _gradients(self, s: int, m: int) -> dict[Leaf, Tensor] | None:
        """Gradients of tensors of a stage's outputs; None for the loss."""
        gradients: dict[Leaf, Tensor] = {}
        sinks = self.graph.sinks[s]
        for b in sinks:
            found = self._back.pop((s, b, m))
            for k, one in zip(self.leaves[m][s, b], found, strict=True):
                if one is not None:
                    gradients[k] = gradients[k] + one if k in gradients else one
        return gradients if sinks else None

    def _give_back(self, s: int, m: int, gradients: Sequence[Tensor | None]) -> None:
        """Keep gradients of a stage's inputs for the stages that they come from."""
        back = iter(gradients)
        for a in self.graph.sources[s]:
            self._back[a, s, m] = [next(back) for _ in self.leaves[m][a, s]]

    def _run_backward_weight(self, s: int, m: int, number: int) -> None:
        del number
        self.stages[s].backward_weight(m)

    def _update(self, s: int, m: int, number: int) -> None:
        del m, number
        self.update(self.stages[s])

    def _unshard(self, s: int, m: int, number: int) -> None:
        del m, number
        self.stages[s].unshard()

    def _reshard(self, s: int, m: int, number: int) -> None:
        del m, number
        self.stages[s].reshard()

    def _reduce(self, s: int, m: int, number: int) -> None:
        del m, number
        self.stages[s].reduce()

    # Messages: of a stage, a micro-batch, and the stage at the other end

    def _send_forward(self, s: int, m: int, other: int) -> None:
        ys = self._forward.pop((s, other, m))
        for edge, y in zip(self.edges[m][s, other], ys, strict=True):
            edge.forward.send(m, y)

    def _receive_forward(self, s: int, m: int, other: int) -> None:
        self._forward[other, s, m] = [e.forward.receive(m) for e in self.edges[m][other, s]]

    def _send_back(self, s: int, m: int, other: int) -> None:
        gradients = self._back.pop((other, s, m))
        for edge, gradient in zip(self.edges[m][other, s], gradients, strict=True):
            if edge.back is not None:
                edge.back.send(m, gradient)

    def _receive_back(self, s: int, m: int, other: int) -> None:
        self._back[s, other, m] = [
            None if edge.back is None else edge.back.receive(m) for edge in self.edges[m][s, other]
        ]


_RUN: Mapping[Kind, Callable[[Step, int, int, int], None]] = {
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


def resolved(row: Sequence[Action], trains: bool = True) -> list[Resolved]:
    """A worker's actions, as `Step` runs them.

    Args:
        trains: False: forwards are evaluations.
    """
    found = []
    for action in row:
        m, number, run = action.micro_batch, action.other, _RUN[action.kind]
        if action.kind == Kind.FORWARD:
            number = action.version
            run = run if trains else Step._evaluate
        none = -1
        found.append(
            Resolved(
                run,
                action.stage,
                none if m is None else m,
                none if number is None else number,
            )
        )
    return found


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
            _, s, m, other = resolved([action])[0]
            forward = action.kind == Kind.RECV_F
            ends = s, other
            for edge in edges[m][ends[::-1] if forward else ends]:
                lane = edge.forward if forward else edge.back
                if lane is None:
                    continue
                orders.setdefault(id(lane), (lane, []))[1].append(m)
    return list(orders.values())
