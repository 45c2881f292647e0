"""Data parallel training in which one worker leaves something out: a contract for every backend."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st

import linop
from linop.backends.engine.base import Backend
from linop.strategies import DataParallel, Mesh, fully_shard

OTHERS = {
    "another learning rate": "lr=0.02",
    "another learning rate from the start": "lr=0.02",
    "another optimizer": "Adam(",
}
FAULTS = (
    *("nothing", "a step", "a backward", "a frozen parameter", "forward and backward"),
    *OTHERS,
)
STRATEGIES: dict[str, dict[str, Any]] = {
    "data parallel": {},
    "a mean": {"reduction": "mean"},
    "a ring": {"algorithm": "ring"},
    "small buckets": {"bucket_cap_mb": 0},
}
SHARDED = "sharded", "sharded, ahead", "sharded, kept"


class Case(NamedTuple):
    strategy: str
    fault: str
    odd: int
    at: int
    widths: tuple[int, ...]
    dtype: str


@st.composite
def cases(draw: st.DrawFn, workers: int) -> Case:
    strategy = draw(st.sampled_from([*STRATEGIES, *SHARDED]))
    faults = [one for one in FAULTS if strategy not in SHARDED or one != "a backward"]
    return Case(
        strategy,
        draw(st.sampled_from(faults)),
        draw(st.integers(0, workers - 1)),
        draw(st.integers(1, 2)),
        tuple(draw(st.lists(st.integers(1, 9), min_size=2, max_size=3))),
        draw(st.sampled_from(["float32", "float64", "bfloat16"])),
    )


def network(case: Case) -> Any:
    layers = []
    for k, (before, after) in enumerate(zip(case.widths, case.widths[1:], strict=False)):
        layer = torch.nn.Linear(before, after, dtype=getattr(torch, case.dtype))
        with torch.no_grad():
            layer.weight.fill_(0.25 + k)
            layer.bias.fill_(1)
        layers.append(layer)
    return torch.nn.Sequential(*layers)


def parallel(case: Case, axis: Any) -> Any:
    net = network(case)
    if case.strategy in STRATEGIES:
        return DataParallel(net, axis, **STRATEGIES[case.strategy])
    options = {"sharded, ahead": {"prefetch": 1}, "sharded, kept": {"reshard_after_forward": False}}
    for layer in net:
        fully_shard(layer, axis, **options.get(case.strategy, {}))  # type: ignore[arg-type]
    return net


def is_noticed(backend: Backend, case: Case) -> None:
    """By the first message that can tell, with one text on all workers; nothing else is."""
    net = parallel(case, Mesh(dp=backend.workers or 1)["dp"])
    optimizer: Any = torch.optim.SGD(net.parameters(), 0.01)
    if case.fault == "another learning rate from the start" and backend.worker == case.odd:
        optimizer = torch.optim.SGD(net.parameters(), 0.02)
    x, said = torch.ones(2, case.widths[0], dtype=getattr(torch, case.dtype)), "nothing"
    last = case.at + 1
    try:
        for k in range(last + 1):
            fault = case.fault if k == case.at and backend.worker == case.odd else ""
            optimizer.zero_grad()
            if fault == "another learning rate":
                optimizer.param_groups[0]["lr"] = 0.02
            if fault == "another optimizer":
                optimizer = torch.optim.Adam(net.parameters(), 0.01)
            if fault == "a frozen parameter":
                next(iter(net.parameters())).requires_grad_(False)
            if fault != "forward and backward":
                loss = net(x).sum()
                if fault != "a backward":
                    loss.backward()
            if fault != "a step":
                optimizer.step()
        if case.fault in ("a backward", "forward and backward") and backend.worker == case.odd:
            net(x).sum().backward()  # as often as the others
    except linop.LinopError as error:
        said = str(error)
    everybodys = backend._meeting().gather_all(said)  # type: ignore[union-attr]
    assert len(set(everybodys)) == 1, everybodys
    words = {
        "nothing": "nothing",
        "a step": "optimizers' steps since",
        "a backward": "forwards of training since",
        "a frozen parameter": "parameters without requires_grad: ",
        "forward and backward": "optimizers' steps since",
        **OTHERS,
    }[case.fault]
    assert words in said, (case, said)
    if case.fault != "nothing":
        assert f"on workers [{case.odd}]" in said, (case, said)
