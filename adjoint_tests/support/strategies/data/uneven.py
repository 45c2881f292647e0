"""Data parallel workers with different numbers of batches, whose calls have drawn orders: contracts
for every backend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st

import linop
from linop.backends.engine.base import Backend
from linop.strategies import DataParallel
from support.strategies.pipelines.pipelines import values

FAULTS = {
    "another call": "calls {} with a batch, where others take part without one",
    "calls twice": "takes part twice in one step",
    "calls nothing": "does nothing in a step in which it has no batch",
    "no backward": "has a batch, and sums no gradients",
    "other rows": "has no batch, and says that it has rows",
    "raises": "has batches that end in an error",
}


class Case(NamedTuple):
    """Orders of calls: S is `share`, F the net, B backward, W `without_batch`, T `total`.

    Args:
        batches: of each worker.
        own: calls with a batch, one order for a worker.
        others: calls without.
    """

    batches: tuple[int, ...]
    own: tuple[str, ...]
    others: tuple[str, ...]
    options: tuple[tuple[str, Any], ...]
    buffers: bool
    fault: str = ""


@st.composite
def cases(draw: st.DrawFn, workers: int, faults: tuple[str, ...] = ("",)) -> Case:
    batches = draw(st.lists(st.integers(0, 3), min_size=workers, max_size=workers))
    batches[draw(st.integers(0, workers - 1))] = 1 + max(batches)
    order = "".join(draw(st.permutations(["S", "F", *draw(st.sampled_from(["", "S", "F"]))])))
    after = draw(st.sampled_from(["", "T"]))
    alone = draw(st.lists(st.sampled_from(["W", "SW", "SSW", "WS"]), min_size=workers))
    options: list[dict[str, Any]] = [{}, {"algorithm": "ring"}, {"server": 0}, {"bucket_cap_mb": 0}]
    return Case(
        tuple(batches),
        (order + "B" + after,) * workers,
        tuple(one + after for one in alone[:workers]),
        tuple(draw(st.sampled_from(options)).items()),
        draw(st.booleans()),
        draw(st.sampled_from(faults)),
    )


def network(case: Case) -> Any:
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)).double()
    if case.buffers:
        net.register_buffer("mask", torch.ones(3))
    with torch.no_grad():
        for k, p in enumerate(net.parameters()):
            p.copy_(values(*p.shape, seed=k))
    return net


def batch_of(worker: int, k: int) -> Any:
    return values(1 + worker % 3, 3, seed=10 * worker + k)


def run(net: Any, calls: str, x: Any, rows: int | None = None) -> None:
    """The calls of a step."""
    share = 1.0
    for call in calls:
        if call == "S":
            share = net.share(rows if rows is not None else 0 if x is None else len(x))
        elif call == "F":
            y = net(x)
        elif call == "B":
            ((y * y).sum(1).mean() * share).backward()
        elif call == "W":
            net.without_batch()
        else:
            net.total(torch.ones(()))


def is_one_process(backend: Backend, case: Case) -> None:
    """Steps of the mean over the rows of all workers that have a batch."""
    me: int = backend.worker or 0
    net, twin = DataParallel(network(case), reduction="sum", **dict(case.options)), network(case)
    steps = [torch.optim.SGD(one.parameters(), lr=2.0**-7) for one in (net, twin)]
    done = 0
    for k, x in enumerate(net.joined(batch_of(me, k) for k in range(case.batches[me]))):
        for one in steps:
            one.zero_grad()
        run(net, (case.others if x is None else case.own)[me], x)
        rows = torch.cat([batch_of(w, k) for w, n in enumerate(case.batches) if k < n])
        y = twin(rows)
        (y * y).sum(1).mean().backward()
        grads = [p.grad for p in net.parameters()]
        if "server" not in dict(case.options) or me == 0:
            for grad, q in zip(grads, twin.parameters(), strict=True):
                torch.testing.assert_close(grad, q.grad, rtol=1e-12, atol=1e-12)
        for one in steps:
            one.step()
        done += 1
    assert done == max(case.batches)


def is_an_error(backend: Backend, case: Case) -> None:
    """A worker does something else than the others wait for: one error, of one text, on all."""
    me: int = backend.worker or 0
    net = DataParallel(network(case), reduction="sum", **dict(case.options))
    most = max(range(len(case.batches)), key=case.batches.__getitem__)
    least = min(range(len(case.batches)), key=case.batches.__getitem__)
    last = case.batches[most] - 1

    def batches() -> Iterator[Any]:
        yield from (batch_of(me, k) for k in range(case.batches[me]))
        if case.fault == "raises" and me == least:
            raise ValueError("no file")

    said = ""
    try:
        for k, x in enumerate(net.joined(batches())):
            calls, rows = (case.others if x is None else case.own)[me], None
            if k == last and me == most:
                if case.fault == "another call":
                    calls = "T" + calls
                if case.fault == "no backward":
                    calls = calls.replace("B", "")
            if k == last and me == least:
                if case.fault == "calls twice":
                    calls += "W"
                if case.fault == "calls nothing":
                    calls = "S"
                if case.fault == "other rows":
                    calls, rows = "SW", 2
            run(net, calls, x, rows)
    except linop.LinopError as error:
        said = str(error)
    everybodys = backend._meeting().gather_all(said)  # type: ignore[union-attr]
    assert len(set(everybodys)) == 1, everybodys
    words = "joined: on worker" if case.fault == "raises" else "linop.strategies.DataParallel"
    words = "DataParallel" if case.fault == "other rows" else words
    assert words in said or "workers do different things" in said, (case, said)


def ends_early(backend: Backend, case: Case) -> None:
    """The worker with most batches leaves the loop, and the program goes on without it."""
    me: int = backend.worker or 0
    net = DataParallel(network(case), reduction="sum", **dict(case.options))
    most = max(range(len(case.batches)), key=case.batches.__getitem__)
    for k, x in enumerate(net.joined(batch_of(me, k) for k in range(case.batches[me]))):
        if k == case.batches[most] - 1 and me == most:
            return
        run(net, (case.others if x is None else case.own)[me], x)
