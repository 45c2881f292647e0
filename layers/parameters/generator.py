"""Seeds of torch's generator for a time, which threads of a process share."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from linop.backends.together.turns import Turn

_GENERATOR = threading.RLock()
"""Held by a thread while torch's generator has a seed of its own, but for the time in which it
waits for another worker (`Seeded`)."""


def initial_seed() -> int:
    """The seed that the program gave torch's generator, or that it began with."""
    with _GENERATOR:
        seed: int = torch.initial_seed()
        return seed


def drawn_seed() -> int:
    """An int64 of the generator as the program left it; of another one where torch's tracers
    compute shapes alone (`linop.strategies.estimate`), after which it is as before."""
    with _GENERATOR, unset_fake_temporarily() as tracer:
        other = None if tracer is None else torch.Generator()
        return int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=other))


def seed_of(text: str) -> int:
    """A seed of 64 bits for a text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


class Seeded(Turn):
    """Context in which torch's generator starts at a seed, in this thread alone, and after which it
    is as before.

    Args:
        seed: None: it starts as it is.
    """

    __slots__ = ("_before", "_seed", "_start", "_state")

    def __init__(self, seed: int | None) -> None:
        self._seed = seed
        self._state: Any = None
        """Of the generator for this turn, while others have it; None before it begins."""
        self._start: Any = None
        self._before: Any = None

    def take_again(self) -> None:
        _GENERATOR.acquire()
        generator = torch.default_generator
        self._before = generator.get_state()
        if self._state is not None:
            generator.set_state(self._state)
        elif self._seed is None:
            self._start = self._before
        else:
            generator.manual_seed(self._seed)
            self._start = generator.get_state()

    def give_up(self) -> None:
        self._state = torch.default_generator.get_state()
        torch.default_generator.set_state(self._before)
        _GENERATOR.release()

    @property
    def drew(self) -> bool:
        """True if random numbers were drawn, after the context."""
        start, end = (state.numpy().tobytes() for state in (self._start, self._state))
        return bool(start != end)  # faster than `torch.equal`, once in a step


@contextmanager
def from_seed_on(seed: int, device: Any) -> Iterator[None]:
    """`Seeded`, for draws on any device."""
    with Seeded(seed):
        if device.type in ("cpu", "meta"):
            yield
            return
        with torch.random.fork_rng([device], device_type=device.type):
            torch.get_device_module(device.type).manual_seed(seed)
            yield
