"""The way through the code: four walks, counted.

    python benchmarks/planning/walks.py [--forms]

prints, for one of two workers that are threads, how many functions of linop are called, in how many
modules, and how often a call is of another module than the call before it. With ``--forms``, too:
the classes of which instances are handed from function to function on the way of a broadcast's
first call from expression to text, by module. Waits are left out; the order in which the workers
meet adds or takes some calls of a thousand.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Annotated, Any

import numpy as np
import torch
import typer

import linop
from linop import Partition, TensorSpace
from linop.backends import Backend
from linop.layers import Conv2d
from linop.strategies import Pipeline, split

WORKERS = 2
_WAITS = (
    "linop.backends.threads.group",
    "linop.backends.threads.mailboxes",
    *(
        f"linop.backends.together.{name}"
        for name in ("counted_threads", "deadlock", "detection", "recorder", "turns", "watchdog")
    ),
)
"""Modules whose calls depend on how long a worker waits."""


class Walk:
    """The calls of functions of linop while it is entered."""

    def __init__(self) -> None:
        self.modules: list[str] = []
        self.forms: Counter[type] = Counter()

    def __enter__(self) -> Walk:
        sys.setprofile(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _see(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        name = frame.f_globals.get("__name__", "")
        if not name.startswith("linop.") or name.startswith(_WAITS):
            return
        self.modules.append(name)
        code = frame.f_code
        given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        kinds = {type(frame.f_locals.get(one)) for one in given}
        self.forms.update(kind for kind in kinds if kind.__module__.startswith("linop."))

    def counts(self) -> tuple[int, int, int]:
        """Calls, modules, changes of module."""
        pairs = zip(self.modules, self.modules[1:], strict=False)
        return len(self.modules), len({*self.modules}), sum(a != b for a, b in pairs)


Walks = dict[str, Walk]


def broadcast(backend: Backend) -> Walks:
    """From the call of `linop.broadcast` to the result, and a second call of the plan."""
    x = np.ones(1000) if backend.worker == 0 else None
    walks = {"broadcast, first call": Walk(), "broadcast, second call": Walk()}
    first, second = walks.values()
    with first:
        op = linop.broadcast(TensorSpace((1000,), Partition((1,))), Partition((WORKERS,)))
        plan = op.compile(backend)
        plan(x)
    with second:
        plan(x)
    return walks


def convolution(backend: Backend) -> Walks:
    """A convolution split in space: its first call, and a later one, forward and backward."""
    layer = Conv2d(Partition((1, 1, WORKERS, 1)), 2, 3, 3, padding=1)
    x = torch.ones(1, 2, 8, 16, requires_grad=True)
    walks = {"convolution, first forward and backward": Walk(), "convolution, later": Walk()}
    for walk in walks.values():
        with walk:
            layer(x).sum().backward()
    return walks


def pipeline(backend: Backend) -> Walks:
    """A step of a pipeline: the first, and a later one."""
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    table = linop.schedules.one_forward_one_backward(WORKERS, micro_batches=2)
    loss = torch.nn.MSELoss(reduction="sum")
    pipe = Pipeline(split(net, ["1"]), table, loss, backend=backend)
    x, y = torch.ones(4, 4), torch.zeros(4, 4)
    walks = {"pipeline, first step": Walk(), "pipeline, later": Walk()}
    for walk in walks.values():
        with walk:
            pipe.step(x, y)
    return walks


CASES: list[Callable[[Backend], Walks]] = [broadcast, convolution, pipeline]


def main(forms: Annotated[bool, typer.Option(help="the classes, too")] = False) -> None:
    """Print the table."""
    walks: Walks = {}
    for case in CASES:
        walks |= linop.launch(case, WORKERS, "threads")[0]
    print("| walk | calls | modules | changes of module |\n| --- | --- | --- | --- |")
    for name, walk in walks.items():
        print(f"| {name} | " + " | ".join(f"{n:,}" for n in walk.counts()) + " |")
    if forms:
        print("\n| module | classes handed on in a broadcast's first call |\n| --- | --- |")
        kinds = walks["broadcast, first call"].forms
        for module in sorted({kind.__module__ for kind in kinds}):
            here = sorted(kind.__name__ for kind in kinds if kind.__module__ == module)
            print(f"| {module} | {', '.join(here)} |")


if __name__ == "__main__":
    typer.run(main)
