"""The time of a step that `linop.schedules.simulate` predicts from measured costs of its actions,
beside the measured step; and the bytes that a stage keeps, predicted and counted.

    python benchmarks/strategies/pipelines/simulated.py [--micro-batches 8] [--rounds 100]

It starts an MPI job of two ranks itself, and prints Markdown tables. In each round every schedule
makes a step, and then the costs are measured: a rank's own row of the schedule, with messages that
are there already, while the other rank executes its own; sends to free slots, and receives of what
has come; and the agreement on the call. The simulator gets those of each round, and two cores.
Columns are quantiles over rounds: the median, or on a machine with other work a lower one.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))  # this checkout is measured, whatever is installed
sys.path.insert(0, str(ROOT / "adjoint_tests"))  # its counter of bytes

import linop  # noqa: E402
from benchmarks.harness.jobs import show  # noqa: E402
from benchmarks.harness.report import markdown  # noqa: E402
from benchmarks.strategies.pipelines.pipeline import LAYERS, SIZES, squares  # noqa: E402
from linop.schedules import GENERATORS, Action, Kind, simulate  # noqa: E402

SCHEDULES = "gpipe", "1f1b"
ACTIONS = "F µs", "B", "U", "messages"
TITLES = "schedule", "width", "batch", *ACTIONS, "step", "simulated", "to measured"
BYTES = "stage", "bytes counted", "predicted", "to GPipe's"
BEGIN = "begin"
Costs = dict[Any, float]
"""Seconds, by action, by rank and kind of message, and by rank of what comes before a step."""


def main(
    micro_batches: Annotated[int, typer.Option(help="number")] = 8,
    rounds: Annotated[int, typer.Option(help="for each width")] = 100,
    quantile: Annotated[float, typer.Option(help="of the rounds")] = 0.5,
) -> None:
    """Measure in an MPI job."""
    print(f"Load of the machine before: {os.getloadavg()[0]:.1f}.\n")
    show(2, TITLES, measure, micro_batches, rounds, quantile)
    print()
    print(markdown(("schedule", *BYTES), memory(micro_batches)))


def measure(comm: Any, count: int, rounds: int, quantile: float) -> Iterator[Sequence[Any]]:
    """Program of a rank: rows of the table."""
    import numpy as np
    import torch

    torch.set_num_threads(1)
    backend: Any = linop.backends.get("mpi")
    for width, rows in SIZES:
        sides = {name: Side(comm, backend, name, width, rows, count) for name in SCHEDULES}
        few = max(5, min(rounds, rounds * 256 // width))
        gc.disable()
        for number in range(-3, few):  # the first ones warm up
            for side in sides.values():
                side.round(kept=number >= 0)
            gc.collect(0)
        gc.enable()
        for name, side in sides.items():
            steps, costs = side.everybodys()
            one, other = (
                float(np.quantile(times, quantile)) * 1e6
                for times in (steps, [side.predicted(each) for each in costs])
            )
            kinds = (f"{1e6 * each:.0f}" for each in by_kind(costs, quantile))
            yield name, width, rows, *kinds, f"{one:.0f}", f"{other:.0f}", f"{other / one:.2f}"


def by_kind(costs: Sequence[Costs], quantile: float) -> list[float]:
    """Costs of forwards, backwards, updates, and of both ends of a message: means over stages."""
    import numpy as np

    def of(wanted: Callable[[Any], bool]) -> float:
        each = [statistics.fmean(t for key, t in one.items() if wanted(key)) for one in costs]
        return float(np.quantile(each, quantile))

    found = [
        of(lambda key, kind=kind: isinstance(key, Action) and key.kind == kind)  # type: ignore[misc]
        for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.UPDATE)
    ]
    return [*found, 2 * of(lambda key: isinstance(key, tuple) and key[1] != BEGIN)]


class Here:
    """A lane whose messages are there already."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    posts = False

    def sending(self, k: int) -> Callable[[Any], None]:
        """See `linop.strategies.pipelines.lanes.Lane`."""
        del k
        return lambda tensor: None

    def receiving(self, k: int, count: int) -> Callable[[], Any]:
        """See `linop.strategies.pipelines.lanes.Lane`."""
        del k, count
        return self._tensor.detach  # a stage asks for its gradient


class Side:
    """A pipeline of two stages, its actions alone, and its messages alone."""

    def __init__(
        self, comm: Any, backend: Any, name: str, width: int, rows: int, count: int
    ) -> None:
        import torch

        from linop.spaces.partition import Partition
        from linop.spaces.tensor import TensorSpace
        from linop.strategies import Pipeline
        from linop.strategies.pipelines.construction import planned
        from linop.strategies.pipelines.lanes import Edge, Moved
        from linop.strategies.pipelines.stages.stage import Stage

        torch.manual_seed(0)
        layers = [
            torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Tanh())
            for _ in range(LAYERS)
        ]
        half = LAYERS // 2
        stages = [torch.nn.Sequential(*layers[:half]), torch.nn.Sequential(*layers[half:])]
        me = self.rank = comm.rank
        self.comm, self.count = comm, count
        self.x, self.target = torch.randn(rows, width), torch.randn(rows, width)
        self.table = GENERATORS[name](2, count)
        sgd = partial(torch.optim.SGD, lr=1e-6)
        self.pipe = Pipeline(stages, self.table, squares, optimizer=sgd, backend=backend)
        self.plan = planned(stages, self.table, backend, None, None, None)
        self.stage = Stage(me, stages[me], self.plan.row, self.plan.graph.taken(me))
        self.optimizer = sgd(stages[me].parameters())
        self.message = torch.randn(rows // count, width)
        first, second = (Partition((1,), [worker]) for worker in (0, 1))
        block = TensorSpace(tuple(self.message.shape), first, "float32")
        self.edge = Edge(backend, Moved(block, torch.float32), second, (count, count))
        self.steps: list[float] = []
        self.costs: list[Costs] = []

    def round(self, kept: bool) -> None:
        """A step, and each cost."""
        from linop.strategies.pipelines.batches import NOTHING, target_of

        self.comm.Barrier()
        step = seconds(lambda: self.pipe.step(self.x, self.target))
        costs: Costs = {}
        self.comm.Barrier()
        pipe = self.pipe
        given, target = pipe._given(self.x, {}), target_of(self.target)
        agree = partial(pipe._agreed, True, given, target if self.rank else NOTHING, None)
        costs[self.rank, BEGIN] = seconds(agree)
        self._actions(costs)
        self._messages(costs)
        if kept:
            self.steps.append(step)
            self.costs.append(costs)

    def _actions(self, costs: Costs) -> None:
        """This rank's actions, with messages that are there already, as the other's run beside."""
        import torch

        from linop.strategies.pipelines.execution import Resolver, Step, receives
        from linop.strategies.pipelines.forms import ALL

        lane: Any = Here(self.message)
        edge: Any = type("Both", (), {"forward": lane, "back": lane})
        edges = [{(0, 1): [edge]}] * self.count
        leaves = [{(0, 1): [(ALL, 0)]}] * self.count
        xs, targets = self.x.chunk(self.count), self.target.chunk(self.count)

        def update(stage: Any) -> None:
            stage.renew()
            self.optimizer.step()
            for p in stage.parameters:
                p.grad = None
            stage.renewed()

        def loss(m: int, y: Any) -> Any:
            return squares(y, targets[m])

        orders = receives(self.plan.table, edges)
        resolver = Resolver(self.plan.graph, {self.rank: self.stage}, edges, leaves, orders)
        step = Step(lambda m: [xs[m]], loss, update)
        self.stage.begin()
        self.comm.Barrier()
        with torch.enable_grad():
            for action in self.plan.row:
                costs[action] = seconds(partial(step.run, resolver.actions([action])))

    def _messages(self, costs: Costs) -> None:
        """Sends to free slots, and receives of what is there: the mean of all."""
        for lane, sender, kinds in (
            (self.edge.lanes[0], 0, (Kind.SEND_F, Kind.RECV_F)),
            (self.edge.lanes[1], 1, (Kind.SEND_B, Kind.RECV_B)),
        ):
            if lane.posts:
                lane.open(self.count)
            for turn, kind in enumerate(kinds):
                self.comm.Barrier()
                if (self.rank == sender) == (turn == 0):
                    numbers = range(self.count)
                    if turn:
                        runs = [lane.receiving(k, self.count) for k in numbers]
                    else:
                        runs = [partial(lane.sending(k), self.message) for k in numbers]
                    each = [seconds(run) for run in runs]
                    costs[self.rank, kind] = statistics.fmean(each)

    def everybodys(self) -> tuple[list[float], list[Costs]]:
        """Of each round the time of a step, of the slower rank, and the costs of both."""
        steps = list(map(max, *self.comm.allgather(self.steps)))
        return steps, [a | b for a, b in zip(*self.comm.allgather(self.costs), strict=True)]

    def predicted(self, costs: Costs) -> float:
        """The simulator's time. A receive is work of the action that needs its message, and the
        agreement of the first one."""
        receives = {(1, Kind.FORWARD): Kind.RECV_F, (0, Kind.BACKWARD): Kind.RECV_B}

        def cost(action: Action) -> float:
            stage, kind = action.stage, action.kind
            first = action.micro_batch == 0 and kind == Kind.FORWARD
            begin = costs[stage, BEGIN] if first else 0.0
            return costs[action] + costs.get((stage, receives.get((stage, kind))), 0.0) + begin

        def send(action: Action) -> float:
            return costs[action.stage, action.kind]

        return float(simulate(self.table, cost, edges=send, overlap=False, cores=2).time)


def seconds(run: Callable[[], Any]) -> float:
    """The time of one call."""
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def memory(count: int) -> Iterator[Sequence[Any]]:
    """Rows of the table of bytes: two stages of the tests, on threads."""
    from support.strategies.pipelines.pipelines import Case
    from support.strategies.pipelines.saved_bytes import counted_and_predicted

    gpipe: list[int] = []
    for name in SCHEDULES:
        case = Case(name, 2, count, width=64, dtype="float32")
        found = linop.launch(partial(counted_and_predicted, case=case), 2, "threads")
        gpipe = gpipe or [counted for counted, _ in found]
        for stage, (counted, predicted) in enumerate(found):
            share = f"{counted / gpipe[stage]:.3f}"
            yield name, stage, f"{counted:,}", f"{predicted:,.0f}", share


if __name__ == "__main__":
    typer.run(main)
