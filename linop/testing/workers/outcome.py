"""Outcome of one example on several ranks, its report, and the exception for a failure.

A rank that fails, dies, or does not answer in time raises the same `FailedExampleError`, since
Hypothesis would take different exception types for different bugs. Running an example, on ranks or
on threads, is left to the other modules of this package.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from linop.testing.workers.rank import Answer

Answers = dict[int, Answer | None]
"""Answers by rank, in the order of arrival; None for a rank that died. A rank without an entry is
stuck."""

_ENDED = "ended after it"
"""State of a rank that died after another one, whose death made mpiexec end the job."""
_BLAMED = re.compile(r"process rank (\d+)")
"""The rank blamed for the end of the job, in the output of Open MPI's mpiexec."""
_ABORTED = "called MPI_Abort"
"""Under MPICH, the output of the rank that ended the job."""
_STATES = {
    "rejected": "rejected the example",
    "skipped": "skipped the test",
    "stuck": "was stuck",
}


class FailedExampleError(AssertionError):
    """A rank failed, died, or was stuck; the message has each rank's traceback or stack.

    Example:
        This test of `spmd` raises it::

            @linop.testing.spmd(workers=2)
            def test_of_ranks(backend):
                assert backend.worker == 0

        and pytest shows "test_of_ranks() failed on 2 ranks: rank 0 passed, rank 1 failed", and the
        traceback of rank 1.
    """

    def __init__(self, message: str, outcome: Outcome | None = None) -> None:
        super().__init__(message)
        self.outcome = outcome
        """The outcome; None on ranks that follow rank 0, which has it."""


@dataclass(frozen=True)
class Outcome:
    """The answers of all ranks to one example.

    Attributes:
        example: its name, for reports.
        ranks: the number of ranks.
        answers: by rank.
        printed: the output of ranks, with the stack of those that were stuck.
        note: further text for the report, such as mpiexec's output.
        kind: "ranks" or "threads".
        seconds: from the begin of the example until its ranks were ready for the next, or ended.
    """

    example: str
    ranks: int
    answers: Answers
    printed: Mapping[int, str] = field(default_factory=dict)
    note: str = ""
    kind: str = "ranks"
    seconds: float = 0.0

    @property
    def alike(self) -> str:
        """The common kind of all ranks' answers ("passed", "rejected" or "skipped"); empty if they
        differ or a rank failed."""
        kinds = {self._kind(rank) for rank in range(self.ranks)}
        return kinds.pop() if kinds in ({"passed"}, {"rejected"}, {"skipped"}) else ""

    @property
    def complete(self) -> bool:
        """True if every rank has answered."""
        return len(self.answers) == self.ranks and None not in self.answers.values()

    @property
    def timed_out(self) -> bool:
        """True if ranks were stuck until the timeout, and no rank failed or died."""
        given = [answer for answer in self.answers.values() if answer is None or not answer.passed]
        return not given and not self.complete

    @property
    def usable(self) -> bool:
        """True if every rank can run another example."""
        return self.complete and all(a is not None and a.usable for a in self.answers.values())

    def settle(self) -> None:
        """Raise the common outcome of all ranks: return if all passed, reject the example in
        Hypothesis, or skip the test.

        Raises:
            FailedExampleError: a rank failed, died or was stuck; or the ranks' outcomes differ.
        """
        __tracebackhide__ = True
        if self.alike == "rejected":
            import hypothesis

            hypothesis.reject()
        if self.alike == "skipped":
            import pytest

            answer = self.answers[0]
            pytest.skip(answer.text if answer else "")
        if self.alike != "passed":
            raise FailedExampleError(self.report(), self)

    def report(self) -> str:
        """The state of each rank, then tracebacks and output, those of ranks that agree only
        once."""
        states = {rank: self.state(rank) for rank in range(self.ranks)}
        lines = [f"{self.example} failed on {self.ranks} {self.kind}: {_listed(states)}"]
        sections: dict[tuple[str, str], list[int]] = {}
        for rank, state in states.items():
            sections.setdefault((state, self._words(rank)), []).append(rank)
        for (state, text), ranks in sections.items():
            if text:
                lines += [f"--- {_named(ranks, state)}", text]
        if self.note:
            lines += ["---", self.note]
        return "\n".join(line.rstrip() for line in lines)

    def state(self, rank: int) -> str:
        """The state of a rank as text: "passed", "failed", "was stuck", "died", …"""
        kind = self._kind(rank)
        if kind == "died":
            fatal = "Fatal Python error: " in self.printed.get(rank, "")
            return "died" if rank == self._first_dead or fatal else _ENDED
        return _STATES.get(kind, kind)

    @property
    def _first_dead(self) -> int:
        """The rank that mpiexec, or the rank's own output, blames for the end of the job; otherwise
        the first rank found dead, which may be the wrong one if two died at once."""
        dead = [rank for rank, answer in self.answers.items() if answer is None]
        blamed = [rank for rank in dead if _ABORTED in self.printed.get(rank, "")]
        blamed += map(int, _BLAMED.findall(self.note))
        return next((rank for rank in blamed if rank in dead), dead[0])

    def _kind(self, rank: int) -> str:
        answer = self.answers.get(rank, Answer("stuck"))
        return "died" if answer is None else answer.kind

    def _words(self, rank: int) -> str:
        answer = self.answers.get(rank)
        said = "" if answer is None else answer.text
        return "\n".join(filter(None, [said.rstrip(), self.printed.get(rank, "").rstrip()]))


def _listed(states: Mapping[int, str]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, state in states.items():
        ranks.setdefault(state, []).append(rank)
    return ", ".join(_named(who, state) for state, who in ranks.items())


def _named(ranks: list[int], state: str) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} {state}"
    return f"ranks {', '.join(map(str, ranks))} {state.replace('was ', 'were ')}"
