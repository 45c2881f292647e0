"""Time of a step of a chain that is checkpointed or offloaded, beside torch's own, in one process.

    python benchmarks/strategies/memory.py

prints a table: median milliseconds, of a few steps in turn with those of the others, and the median
ratio to the step named beside it, of steps next to each other in time. torch's are
`torch.utils.checkpoint.checkpoint_sequential` and `torch.autograd.graph.save_on_cpu`: with
``pin_memory`` it copies what is in main memory already once, parameters too; without it, nothing.
`offload` copies what is no parameter out and back.
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # this checkout, whatever is installed

import torch  # noqa: E402
from torch.autograd.graph import save_on_cpu  # noqa: E402
from torch.utils.checkpoint import checkpoint_sequential  # noqa: E402

from benchmarks.harness.report import markdown  # noqa: E402
from linop.strategies import checkpoint, offload  # noqa: E402

WIDTHS, ROWS, MODULES, EVERY = (64, 256), 64, 8, 2
TURNS, WARM, TURN = 40, 4, 2
"""Rounds, those before them, and steps of one kind in a row."""
Step = Callable[[], None]
Case = tuple[str, str, Step]
"""Name of a step, name of that which it is compared with, and the step."""


def chain(width: int) -> Any:
    """Modules of two linear layers, four times as wide inside."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        *(
            torch.nn.Sequential(
                torch.nn.Linear(width, 4 * width),
                torch.nn.GELU(),
                torch.nn.Linear(4 * width, width),
            )
            for _ in range(MODULES)
        )
    )


def steps(width: int) -> list[Case]:
    """All of them, of chains with the same values."""
    first, x = chain(width), torch.randn(ROWS, width, requires_grad=True)

    def made(change: Callable[[Any], Any], run: Callable[[Any], Any] | None = None) -> Step:
        net = change(copy.deepcopy(first))

        def step() -> None:
            net.zero_grad()
            y = net(x) if run is None else run(net)
            y.square().sum().backward()

        step.net = net  # type: ignore[attr-defined]
        return step

    def segments(net: Any) -> Any:
        return checkpoint_sequential(net, MODULES // EVERY, x, use_reentrant=False)

    def saved(pinned: bool) -> Callable[[Any], Any]:
        def run(net: Any) -> Any:
            with save_on_cpu(pin_memory=pinned):
                return net(x)

        return run

    def same(net: Any) -> Any:
        return net

    return [
        ("plain", "plain", made(same)),
        ("checkpoint_sequential", "plain", made(same, segments)),
        ("checkpoint", "checkpoint_sequential", made(lambda net: checkpoint(net, every=EVERY))),
        ("save_on_cpu", "plain", made(same, saved(False))),
        ("save_on_cpu, pin_memory", "plain", made(same, saved(True))),
        ("offload", "save_on_cpu, pin_memory", made(offload)),
        ("offload, prefetch=0", "save_on_cpu, pin_memory", made(lambda n: offload(n, prefetch=0))),
        (
            "offload of parameters",
            "plain",
            made(lambda net: offload(net, activations=False, parameters=True)),
        ),
    ]


def check(found: Sequence[Case]) -> None:
    """Check that all have the gradients of the first, bit for bit."""
    wanted = None
    for name, _, step in found:
        step()
        gradients = [p.grad for p in step.net.parameters()]  # type: ignore[attr-defined]
        wanted = wanted or gradients
        pairs = zip(gradients, wanted, strict=True)
        assert all(torch.equal(one, other) for one, other in pairs), name


def measured(found: Sequence[Case]) -> Mapping[str, Sequence[float]]:
    """Milliseconds of steps, in turn."""
    times: dict[str, list[float]] = {name: [] for name, _, _ in found}
    for k in range(WARM + TURNS):
        for name, _, step in found:
            step()  # its memory and code are in the caches again
            begun = time.perf_counter()
            for _ in range(TURN):
                step()
            if k >= WARM:
                times[name].append(1e3 * (time.perf_counter() - begun) / TURN)
    return times


def main() -> None:
    """Measure, and print the table."""
    torch.set_num_threads(1)
    lines: dict[str, list[str]] = {}
    for width in WIDTHS:
        found = steps(width)
        check(found)
        times = measured(found)
        for name, base, _ in found:
            each = times[name]
            ratio = statistics.median(a / b for a, b in zip(each, times[base], strict=True))
            row = [f"{statistics.median(each):.2f}", f"{min(each):.2f}", f"{max(each):.2f}"]
            lines.setdefault(name, [base]).extend([*row, f"{ratio:.2f}"])
    titles = ("median ms", "min", "max", "ratio")
    header = ["step", "beside", *(f"{w}: {what}" for w in WIDTHS for what in titles)]
    print(markdown(header, [[name, *row] for name, row in lines.items()]))


if __name__ == "__main__":
    main()
