"""A checked program in the processes of a job that is running: steps that are tried, what the ranks
tell each other about them, and the state that they leave as it was.

Ranks talk by the store of the job's process group, not by collectives: these may be what fails.
"""

from __future__ import annotations

import copy
import faulthandler
import itertools
import os
import random
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from linop.backends.together.messages import decoded, encoded
from linop.errors import ArgumentError, BackendError, LinopError
from linop.testing.parallel.findings import ranks_text
from linop.testing.parallel.recording.programs import Program
from linop.testing.parallel.recording.recorder import Recorder
from linop.testing.parallel.recording.tensors import local

GRACE = 5.0
"""Seconds that other ranks have to come once one has failed."""
_PAUSE = 0.02
_CALLS = itertools.count(1)
"""Numbers of the checks of this job; the same on all ranks."""


@dataclass
class Outcome:
    """Messages of the ranks about one try.

    Attributes:
        errors: of ranks that failed, by rank.
        told: ranks whose error is in our words.
        late: ranks of which nothing was heard, since they wait for those that failed.
        apart: why another try would not begin in step; empty if it would.
    """

    errors: dict[int, str]
    told: tuple[int, ...]
    late: tuple[int, ...]
    apart: str

    @property
    def failed(self) -> bool:
        return bool(self.errors or self.late)

    def error(self, why: str = "") -> LinopError:
        """The exception that it is.

        Args:
            why: a sentence about another try.
        """
        if self.told:
            return ArgumentError(f"rank {self.told[0]}: {self.errors[self.told[0]]}")
        lines = [f"{ranks_text(tuple(self.errors))} of the program failed:"]
        lines += [f"rank {rank}: {text}" for rank, text in self.errors.items()]
        if self.late:
            waits = "waits" if len(self.late) == 1 else "wait"
            lines.append(f"{ranks_text(self.late)} still {waits} for what does not come.")
        return BackendError("\n".join([*lines, *filter(None, [why or self._why()])]))

    def _why(self) -> str:
        how = "`linop verify --torch` in processes of its own tries again by itself"
        if self.late:
            return f"It cannot be tried again here: that rank is not free ({how})."
        return f"It cannot be tried again here: {self.apart} ({how})." if self.apart else ""


@dataclass
class Job:
    """The ranks of a job that check a program together.

    Attributes:
        seconds: the longest time for all of it.
    """

    seconds: float
    rank: int = field(init=False)
    world: int = field(init=False)

    def __post_init__(self) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._begun = time.monotonic()
        prefix = f"linop/check_parallel/{next(_CALLS)}"
        kind: Any = vars(dist)["PrefixStore"]
        self._store: Any = kind(prefix, c10d._get_default_store())
        self._tries = 0
        self._recorders: list[Recorder] = []
        self._before = self._collectives()

    @property
    def left(self) -> float:
        return self._begun + self.seconds - time.monotonic()

    def recorder(self) -> Recorder:
        """A recorder, whose messages are counted if the step fails."""
        self._recorders.append(Recorder())
        return self._recorders[-1]

    # Messages

    def tell(self, name: str, value: Any) -> None:
        """Tell all ranks something."""
        self._store.set(name, encoded(value))

    def heard(self, name: str, seconds: float) -> Any:
        """Message of a rank; None if it does not within a time, or the store is gone."""
        end = time.monotonic() + seconds
        try:
            while not self._store.check([name]):
                if time.monotonic() > end:
                    return None
                time.sleep(_PAUSE)
            return decoded(self._store.get(name))
        except RuntimeError:  # whose process has ended
            return None

    def of_first(self, name: str, value: Any = None) -> Any:
        """Message of rank 0 to all ranks.

        Raises:
            BackendError: nothing is heard of it.
        """
        if self.rank == 0:
            self.tell(name, value)
            return value
        found = self.heard(name, max(self.left, 1.0))
        if found is None:
            raise BackendError(f"nothing is heard of rank 0 within {self.seconds:g} s")
        return found

    # Tries

    def tried(self, step: Callable[[], Any]) -> tuple[Any, Outcome]:
        """Result of a step, None if it fails; and what all ranks know of it. Collective."""
        self._tries += 1
        self._before = self._collectives()
        name = f"try {self._tries}"
        found, text, told = None, "", False
        with self._watched(name):
            try:
                found = step()
            except Exception as error:
                told = isinstance(error, LinopError)
                text = str(error) if told else traceback.format_exc()
        if text:
            self.tell(f"{name}/failed", f"rank {self.rank}: {text}")
        self.tell(f"{name}/{self.rank}", [text, told, self._groups(), self._messages()])
        if self.rank == 0:
            outcome = self._outcome(name)
            self.tell(f"{name}/outcome", list(vars(outcome).values()))
            return found, outcome
        return found, Outcome(*self._from_first(name, text))

    def _from_first(self, name: str, text: str) -> Any:
        """Verdict of rank 0 about a try.

        Args:
            text: the error of this rank.

        Raises:
            BackendError: it says nothing, since it waits itself for a rank that has failed.
        """
        end = time.monotonic() + max(self.left, 1.0)
        has_failed = False
        while time.monotonic() < end:
            if (found := self.heard(f"{name}/outcome", 0.0)) is not None:
                return found
            if not has_failed and self.heard(f"{name}/failed", 0.0) is not None:
                has_failed = True
                end = min(end, time.monotonic() + 3 * GRACE)
            time.sleep(_PAUSE)
        if text:
            mine = Outcome({self.rank: text}, (), (0,), "")
            raise mine.error()
        raise BackendError(f"nothing is heard of rank 0 within {self.seconds:g} s")

    def _outcome(self, name: str) -> Outcome:
        """Messages of all ranks, on rank 0."""
        heard: dict[int, Any] = {}
        end = time.monotonic() + max(self.left, 1.0)
        while len(heard) < self.world and time.monotonic() < end:
            for rank in set(range(self.world)) - set(heard):
                if (one := self.heard(f"{name}/{rank}", 0.0)) is not None:
                    heard[rank] = one
                    if one[0]:  # others may wait for this rank
                        end = min(end, time.monotonic() + GRACE)
            time.sleep(_PAUSE)
        late = tuple(rank for rank in range(self.world) if rank not in heard)
        errors = {rank: one[0] for rank, one in sorted(heard.items()) if one[0]}
        told = tuple(rank for rank in errors if heard[rank][1])
        return Outcome(errors, told, late, _apart(heard))

    @contextmanager
    def _watched(self, name: str) -> Iterator[None]:
        """Context of a step: this process ends if another rank has failed, and this one, which
        waits for it, does not come back. No other thread can interrupt a collective."""
        done = threading.Event()

        def watch() -> None:
            while not done.wait(0.2):
                text = self.heard(f"{name}/failed", 0.0)
                if text is None or done.wait(2 * GRACE):
                    continue
                sys.stderr.write(
                    f"linop: a rank of the program failed, and rank {self.rank} waits for it at\n"
                )
                sys.stderr.flush()
                faulthandler.dump_traceback(2, all_threads=True)
                sys.stderr.write(f"linop: what failed is {text}\n")
                sys.stderr.flush()
                os._exit(1)

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _groups(self) -> list[Any]:
        """The number of process groups that were ever made; and for the groups of this rank, by
        their ranks, how many collectives they have had since the check began, without messages,
        of which ranks may have different numbers."""
        had = self._collectives()
        for key, number in self._before.items():
            had[key] -= number
        for recorder in self._recorders:
            for one in recorder.collectives:
                if one.name in ("send", "receive"):
                    had[tuple(sorted(one.ranks))] -= _counts_messages()
        return [int(c10d._world.group_count), *([[*key], number] for key, number in had.items())]

    def _collectives(self) -> Counter[tuple[int, ...]]:
        """Collectives that the groups of this rank have had in all."""
        found: Counter[tuple[int, ...]] = Counter()
        groups: list[Any] = list(c10d._world.pg_names)
        for group in groups:
            try:
                number = int(group._get_sequence_number_for_group())
            except RuntimeError:  # a backend that counts none
                number = 0
            found[tuple(sorted(dist.get_process_group_ranks(group)))] += number
        return found

    def _messages(self) -> list[Any]:
        """The messages of this rank in its last step: source, target, sign and number."""
        sent: Counter[tuple[int, int, int]] = Counter()
        for recorder in self._recorders:
            for one in recorder.collectives:
                if one.name == "send":
                    sent[self.rank, one.peer, 1] += 1
                elif one.name == "receive":
                    sent[one.peer, self.rank, -1] += 1
        self._recorders.clear()
        return [[*key, number] for key, number in sorted(sent.items())]


def _counts_messages() -> bool:
    """True if messages are among the collectives that a group of the job counts: gloo's."""
    return "gloo" in str(dist.get_backend())


def _apart(heard: dict[int, Any]) -> str:
    """Why ranks are not in step, from what they tell; empty if they are."""
    counts: dict[tuple[int, ...], set[int]] = {}
    for one in heard.values():
        for ranks, number in one[2][1:]:
            counts.setdefault(tuple(ranks), set()).add(number)
    if len({one[2][0] for one in heard.values()}) > 1:
        return "some ranks have made process groups that others have not"
    if any(len(each) > 1 for each in counts.values()):
        return "some ranks have taken part in collectives that others have not"
    balance: Counter[tuple[int, int]] = Counter()
    for one in heard.values():
        for source, target, sign, number in one[3]:
            balance[source, target] += sign * number
    return "messages were sent that no rank has received" if any(balance.values()) else ""


# State


class State:
    """The state of a program in this process: random numbers, and what the modules and optimizers
    hold that its functions return, in case they return those of the job."""

    def __init__(self, program: Program) -> None:
        self._generators = _generators()
        self._modules: list[_Module] = []
        self._optimizers: list[tuple[Any, Any]] = []
        self._values: dict[str, dict[str, torch.Tensor]] = {}
        optimizer = program.optimizer
        self.program = replace(
            program,
            twin=self._keeping("twin", program.twin),
            model=self._keeping("model", program.model),
            optimizer=None if optimizer is None else self._keeping_optimizer(optimizer),
        )

    def restore(self) -> None:
        """Make it what it was. Exactly, but for what the program's own functions keep elsewhere."""
        for optimizer, state in reversed(self._optimizers):
            optimizer.load_state_dict(copy.deepcopy(state))
        for module in reversed(self._modules):
            module.restore()
        self._modules.clear()
        self._optimizers.clear()
        _set_generators(self._generators)

    def _keeping(self, name: str, make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any) -> Any:
            module = make(*args)
            if isinstance(module, torch.nn.Module):
                kept = _Module.of(module)
                self._modules.append(kept)
                self._check_same(name, kept)
            return module

        return made

    def _check_same(self, name: str, kept: _Module) -> None:
        first = self._values.setdefault(name, kept.values)
        for key, value in kept.values.items():
            theirs = first.get(key)
            if theirs is None or theirs.shape != value.shape or not bool(_same(theirs, value)):
                raise ArgumentError(
                    f"{name}() gives another {key!r} when it is called again, so the step cannot "
                    f"be repeated: something that it uses, such as an iterator, was used up"
                )

    def _keeping_optimizer(self, make: Callable[..., Any]) -> Callable[..., Any]:
        def made(parameters: Any) -> Any:
            optimizer = make(parameters)
            if isinstance(optimizer, torch.optim.Optimizer):
                self._optimizers.append((optimizer, copy.deepcopy(optimizer.state_dict())))
            return optimizer

        return made


def _same(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return ((a == b) | ((a != a) & (b != b))).all()


@dataclass
class _Module:
    """A module as it was: parameters and buffers of this rank, gradients, modes."""

    module: torch.nn.Module
    held: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, bool]]
    training: list[tuple[torch.nn.Module, bool]]
    values: dict[str, torch.Tensor]

    @classmethod
    def of(cls, module: torch.nn.Module) -> _Module:
        held, values = [], {}
        with torch.no_grad():
            for name, one in (*module.named_parameters(), *module.named_buffers()):
                values[name] = local(one.detach()).clone()
                held.append((one, values[name], one.grad, one.requires_grad))
            held = [
                (one, value, None if grad is None else grad.detach().clone(), needed)
                for one, value, grad, needed in held
            ]
        training = [(one, one.training) for one in module.modules()]
        return cls(module, held, training, values)

    def restore(self) -> None:
        with torch.no_grad():
            for one, value, grad, needed in self.held:
                own = local(one)
                if own.shape == value.shape and own.dtype == value.dtype:
                    own.detach().copy_(value)
                else:
                    one.data = value.clone()
                one.requires_grad_(needed) if one.is_leaf else None
                one.grad = None if grad is None else grad.clone()
        for module, training in self.training:
            module.training = training


def _generators() -> tuple[Any, ...]:
    on_gpus = torch.cuda.is_available() and torch.cuda.is_initialized()
    gpus = torch.cuda.get_rng_state_all() if on_gpus else []
    of_numpy = np.random.get_state()  # noqa: NPY002  # the one that programs use
    return random.getstate(), of_numpy, torch.get_rng_state(), gpus


def _set_generators(states: tuple[Any, ...]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])  # noqa: NPY002
    torch.set_rng_state(states[2])
    if states[3]:
        torch.cuda.set_rng_state_all(states[3])
