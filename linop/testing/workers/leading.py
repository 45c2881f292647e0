"""Property tests under ``mpiexec -n N pytest``: rank 0 leads, the other ranks follow.

Every rank runs pytest over the same tests, but only rank 0 runs Hypothesis. It sends each example
to the other ranks; the first n ranks run it on a new communicator and answer, and rank 0 reports
the outcome. Orders and answers travel on a control channel, a communicator that no test uses; a
waiting rank polls it, and sleeps in between.

Stuck ranks cannot be restarted here: rank 0 reports, and aborts the job. Stacks are printed by
faulthandler's C code, also if a loop in C holds the interpreter.
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
from linop.testing.workers.signed import SignedMessages
from linop.testing.workers.stacks import OUTPUT, labelled, last_resort

TEAM: Team | None = None
"""The team of this process; None unless the plugin has made one, under ``mpiexec``."""

_TAG = 1
_START = 120.0
"""Timeout in seconds of the collection of tests on all ranks."""
_DUMP, _END = 0.3, 1.8
"""Seconds after the timeout at which ranks print their stacks, and at which rank 0 ends the job."""
_NAPS = 1e-4, 5e-3
"""The first and the longest sleep between polls for a message, in seconds."""


class Team:
    """All ranks of the job, and their control channel. Collective.

    Args:
        tests: the node ids of this rank's tests, in order.

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
            self._messages = SignedMessages(self._control)
            from linop.backends.mpi.objects import gathered

            everybody = gathered(self._control, tests)
        if any(other != tests for other in everybody):
            numbers = [len(other) for other in everybody]
            raise BackendError(
                f"the ranks of this job have collected different tests ({numbers} of them, by "
                "rank): all of them run pytest with the same arguments and in the same order"
            )

    # Rank 0

    def begin(self, test: str) -> None:
        """Set the test to which the examples sent from now on belong."""
        self._test = test

    def end(self, answer: Answer) -> None:
        """Send the outcome of a test, with which the other ranks end it, too."""
        self._tell(range(1, self.size), ("end", self._test, answer))

    def leave(self) -> None:
        """Barrier of all ranks after the last test, since the exit of one process may end the job.
        Collective."""
        if self.rank == 0:
            self._tell(range(1, self.size), ("leave", ""))
        everybody = self._control.Ibarrier()
        while not everybody.Test():
            time.sleep(_NAPS[1])

    def ask(
        self, example: str, located: Located, data: bytes, workers: int, watch: float
    ) -> Outcome:
        """The outcome of a function on every rank.

        Args:
            example: its name, for reports.
            located: the function.
            data: its arguments, pickled.
            workers: the number of ranks.
            watch: timeout in seconds, after which the job is aborted.
        """
        try:
            with last_resort(watch + _END, end=True):
                return self._ask(example, located, data, workers, watch)
        except BaseException as error:  # such as pytest's own timeout: others run the example
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
        """Print the reason, leave the other ranks a moment to print their stacks, and abort."""
        _print(f"\n{self._test}: the job is ended: {why}\n")
        time.sleep(_END)
        self._world.Abort(1)

    # Ranks above 0

    def follow(self, test: str) -> None:
        """Run all examples of a test that rank 0 sends, and end the test as on rank 0.

        Raises:
            FailedExampleError: the test failed on rank 0, or does not run there.
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
            self._messages.send(answer, 0, _TAG)
            alike = self._hear(0, watch + 2 * _DUMP)
            if alike is None and not answer.passed:  # rank 0 is stuck, and cannot report this
                _print(f"\nrank {self.rank} {answer.kind}: {example}\n{answer.text}\n")
            if alike is None:
                alike = self._hear(0)
            if alike:
                self._messages.send(finish(comm, before), 0, _TAG)

    # All ranks

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
        """The communicator of the first `workers` ranks. Collective among them."""
        if workers not in self._groups:
            group = self._world.Get_group().Incl(range(workers))
            self._groups[workers] = self._world.Create_group(group, _TAG)
        return self._groups[workers]

    def _tell(self, others: range, order: Any) -> None:
        for rank in others:
            self._messages.send(order, rank, _TAG)

    def _hear(self, source: int, seconds: float | None = None) -> Any:
        """The next message of a rank on the control channel; None after a timeout in seconds."""
        end = None if seconds is None else time.monotonic() + seconds
        nap, longest = _NAPS
        while not self._control.Iprobe(source, _TAG):
            if end is not None and time.monotonic() > end:
                return None
            time.sleep(nap)
            nap = min(1.2 * nap, longest)
        return self._messages.recv(source, _TAG)


def _end_like(answer: Answer) -> None:
    if answer.kind == "skipped":
        import pytest

        pytest.skip(answer.text)
    if answer.kind == "failed":
        raise FailedExampleError("it failed on rank 0, which has the report")


def _print(text: str) -> None:
    """Print unbuffered, and not captured by pytest."""
    os.write(OUTPUT.descriptor, text.encode(errors="replace"))
