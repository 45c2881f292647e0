"""Property tests under ``mpiexec -n N pytest``: rank 0 leads, the others follow.

Every rank runs pytest over the same tests. Rank 0 alone runs Hypothesis. It sends every example to
the others, all of the first n run it on a communicator of their own, and rank 0 settles what came
of it. The ranks talk over a communicator that no test sees; one that waits sleeps in between.

Ranks that are stuck cannot be started anew here: rank 0 reports, and ends the whole job. Stacks are
printed by C code, so that a loop in C which holds the interpreter cannot prevent it.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
from typing import Any

from linop.errors import BackendError
from linop.testing.workers.located import Located
from linop.testing.workers.outcome import Answers, FailedExampleError, Outcome
from linop.testing.workers.rank import Answer, finish, play, quiet_assume
from linop.testing.workers.stacks import OUTPUT, labelled, last_resort

TEAM: Team | None = None
"""Of this process, under ``mpiexec``; the plugin makes it."""

_TAG = 1
_START = 120.0
"""Seconds in which all ranks have collected their tests."""
_DUMP, _END = 0.3, 1.8
"""Seconds after the watch at which ranks print their stacks, and at which rank 0 ends the job."""
_NAPS = 1e-4, 5e-3
"""The first and the longest sleep between looks for a message."""


class Team:
    """All ranks of the job. Collective.

    Raises:
        BackendError: the ranks have collected different tests; on every rank.
    """

    def __init__(self, tests: list[str]) -> None:
        with last_resort(_START, end=True):
            from mpi4py import MPI

            self._world = MPI.COMM_WORLD
            self._control = self._world.Dup()
            self.rank: int = self._world.rank
            self.size: int = self._world.size
            self._groups: dict[int, Any] = {}
            self._early: tuple[Any, ...] | None = None
            self._test = ""
            everybody = self._control.allgather(tests)
        if any(other != tests for other in everybody):
            numbers = [len(other) for other in everybody]
            raise BackendError(
                f"the ranks of this job have collected different tests ({numbers} of them, by "
                "rank): all of them run pytest with the same arguments and in the same order"
            )

    # Rank 0.

    def begin(self, test: str) -> None:
        """A test begins."""
        self._test = test

    def end(self, answer: Answer) -> None:
        """A test has ended: the others end it likewise."""
        self._tell(range(1, self.size), ("end", self._test, answer))

    def leave(self) -> None:
        """All tests have ended, on this rank: it waits for the others, since the end of a process
        may end the job."""
        if self.rank == 0:
            self._tell(range(1, self.size), ("leave", ""))
        everybody = self._control.Ibarrier()
        while not everybody.Test():
            time.sleep(_NAPS[1])

    def ask(
        self, example: str, located: Located, data: bytes, workers: int, watch: float
    ) -> Outcome:
        """What every rank says of a function, called with pickled arguments."""
        try:
            with last_resort(watch + _END, end=True):
                return self._ask(example, located, data, workers, watch)
        except BaseException as error:  # pytest's own timeout, say: the others are in the example
            self._end_job(f"{example} was interrupted by {type(error).__name__}: {error}")
            raise

    def _ask(
        self, example: str, located: Located, data: bytes, workers: int, watch: float
    ) -> Outcome:
        others = range(1, workers)
        end = time.monotonic() + watch
        self._tell(others, ("example", self._test, (example, located, data, workers, watch)))
        comm, before, answers = self._play(example, located, data, workers)
        outcome = Outcome(example, workers, answers | self._gather(others, end))
        if not outcome.complete:
            self._end_job(f"ranks are stuck; their stacks follow\n{outcome.report()}")
        self._tell(others, outcome.alike)
        if not outcome.alike:
            return outcome
        answers = {0: finish(comm, before)}
        finished = Outcome(example, workers, answers | self._gather(others, end))
        if not finished.complete:
            self._end_job(f"ranks are stuck; their stacks follow\n{finished.report()}")
        return outcome if finished.alike == "passed" else finished

    def _gather(self, others: range, end: float) -> Answers:
        answers: Answers = {}
        for rank in others:
            answer = self._hear(rank, end - time.monotonic())
            if answer is not None:
                answers[rank] = answer
        return answers

    def _end_job(self, why: str) -> None:
        """Ranks cannot be started anew here. The others have a moment to print their stacks."""
        _print(f"\n{self._test}: the job is ended: {why}\n")
        time.sleep(_END)
        self._world.Abort(1)

    # The others.

    def follow(self, test: str) -> None:
        """Run all examples of a test, and end as it does on rank 0.

        Raises:
            FailedExampleError: it failed there, or is not run there.
        """
        while True:
            order = self._early or self._hear(0)
            self._early = None
            if order[1] != test:
                self._early = order
                raise FailedExampleError(f"rank 0 does not run {test}")
            if order[0] == "end":
                _end_like(order[2])
                return
            self._run(*order[2])

    def _run(self, example: str, located: Located, data: bytes, workers: int, watch: float) -> None:
        with last_resort(watch + _DUMP, end=False):
            comm, before, answers = self._play(example, located, data, workers)
            answer = answers[self.rank]
            assert answer is not None
            self._control.send(answer, 0, _TAG)
            alike = self._hear(0, watch + 2 * _DUMP)
            if alike is None and not answer.passed:  # rank 0 is stuck, and cannot say this
                _print(f"\nrank {self.rank} {answer.kind}: {example}\n{answer.text}\n")
            if alike is None:
                alike = self._hear(0)
            if alike:
                self._control.send(finish(comm, before), 0, _TAG)

    # All of them.

    def _play(
        self, example: str, located: Located, data: bytes, workers: int
    ) -> tuple[Any, set[threading.Thread], Answers]:
        quiet_assume()
        before = set(threading.enumerate())
        base = self._group(workers)
        arguments = pickle.loads(data)
        label = f"{example} on rank {self.rank} of {workers}"
        comm, answer = labelled(label, play)(base, located, (arguments,))
        return comm, before, {self.rank: answer}

    def _group(self, workers: int) -> Any:
        """The communicator of the first ranks."""
        if workers not in self._groups:
            group = self._world.Get_group().Incl(range(workers))
            self._groups[workers] = self._world.Create_group(group, _TAG)
        return self._groups[workers]

    def _tell(self, others: range, order: Any) -> None:
        for rank in others:
            self._control.send(order, rank, _TAG)

    def _hear(self, source: int, seconds: float | None = None) -> Any:
        """The next message of a rank; None if there is none in so many seconds."""
        end = None if seconds is None else time.monotonic() + seconds
        nap, longest = _NAPS
        while not self._control.Iprobe(source, _TAG):
            if end is not None and time.monotonic() > end:
                return None
            time.sleep(nap)
            nap = min(1.2 * nap, longest)
        return self._control.recv(source=source, tag=_TAG)


def _end_like(answer: Answer) -> None:
    if answer.kind == "skipped":
        import pytest

        pytest.skip(answer.text)
    if answer.kind == "failed":
        raise FailedExampleError("it failed on rank 0, which has the report")


def _print(text: str) -> None:
    """At once, and past pytest's capture."""
    os.write(OUTPUT.descriptor, text.encode(errors="replace"))
