"""Seeds of torch's generator for a time, which threads of a process share."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from linop.backends.together.turns import kept

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


class Seeded:
    """A turn of this thread with torch's generator.

    Attributes:
        state: of the generator for this turn, while others have it.
    """

    def __init__(self, state: Any) -> None:
        self.state = state
        self._before: Any = None

    def take_again(self) -> None:
        _GENERATOR.acquire()
        self._before = torch.default_generator.get_state()
        torch.default_generator.set_state(self.state)

    def give_up(self) -> None:
        self.state = torch.default_generator.get_state()
        torch.default_generator.set_state(self._before)
        _GENERATOR.release()


@contextmanager
def from_seed(seed: int) -> Iterator[tuple[Any, Seeded]]:
    """Context in which torch's generator starts at a seed, in this thread alone, and after which it
    is as before. It gives the state of that seed, and the turn, with the state at the end."""
    state = torch.Generator().manual_seed(seed).get_state()
    turn = Seeded(state)
    turn.take_again()
    try:
        with kept(turn):
            yield state, turn
    finally:
        turn.give_up()


@contextmanager
def from_seed_on(seed: int, device: Any) -> Iterator[None]:
    """`from_seed`, for draws on any device."""
    with from_seed(seed):
        if device.type in ("cpu", "meta"):
            yield
            return
        with torch.random.fork_rng([device], device_type=device.type):
            torch.get_device_module(device.type).manual_seed(seed)
            yield
