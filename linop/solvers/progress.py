"""Progress of iterative methods, on the first worker: lines, or a bar of tqdm."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol


class Progress(Protocol):
    """A method that says how far it is."""

    def progress(self) -> dict[str, float]:
        """Numbers to show, by name, the most important one first."""


@contextmanager
def shown(
    show: bool | str, backend: Any, name: str
) -> Iterator[Callable[[int, Sequence[Progress]], None]]:
    """A function that shows the progress of methods after an iteration, on the first worker."""
    if not show or getattr(backend, "worker", None) not in (None, 0):
        yield lambda iteration, methods: None
    elif show == "bar":
        from tqdm import tqdm

        with tqdm(desc=name, unit=" iterations") as bar:

            def move(iteration: int, methods: Sequence[Progress]) -> None:
                bar.set_postfix({k: f"{v:.3e}" for k, v in _worst(methods).items()}, refresh=False)
                bar.update(1)

            yield move
    else:

        def line(iteration: int, methods: Sequence[Progress]) -> None:
            numbers = "  ".join(f"{k} {v:.6e}" for k, v in _worst(methods).items())
            print(f"{name} {iteration:5d}  {numbers}")

        yield line


def _worst(methods: Sequence[Progress]) -> dict[str, float]:
    """The progress of the method that is farthest from its end."""
    shown = [method.progress() for method in methods]
    return max(shown, key=lambda numbers: next(iter(numbers.values()), math.nan))
