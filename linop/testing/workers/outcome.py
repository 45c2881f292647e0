"""What came of one example on several ranks, and the one place where that is raised.

A rank that fails, dies, or does not answer in time: all are the one `FailedExampleError`. To
Hypothesis, a fault that shows now as this and now as that would be several.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from linop.testing.workers.rank import Answer

Answers = dict[int, Answer | None]
"""By rank, in the order in which they came; None is a rank that died, and one that is missing was
stuck."""

_ENDED = "ended after it"
"""The state of a rank that died after another: mpiexec ends all of them."""
_BLAMED = re.compile(r"process rank (\d+)")
"""In the words of Open MPI's mpiexec: whose end was the end of the job."""
_ABORTED = "called MPI_Abort"
"""MPICH has the rank itself say so."""
_STATES = {
    "rejected": "rejected the example",
    "skipped": "skipped the test",
    "stuck": "was stuck",
}


class FailedExampleError(AssertionError):
    """Some rank failed, died, or was stuck; the message has the words or the stack of each."""

    def __init__(self, message: str, outcome: Outcome | None = None) -> None:
        super().__init__(message)
        self.outcome = outcome
        """What every rank said; None where another process has it."""


@dataclass(frozen=True)
class Outcome:
    """The answers of all ranks.

    Attributes:
        example: what was run.
        ranks: on how many.
        answers: of each rank.
        printed: what a rank printed, its stack included where it was stuck.
        note: what else is to be said, such as mpiexec's words.
        kind: what ranks are.
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
        """The kind of answer that all ranks gave, where nothing went wrong; else empty."""
        kinds = {self._kind(rank) for rank in range(self.ranks)}
        return kinds.pop() if kinds in ({"passed"}, {"rejected"}, {"skipped"}) else ""

    @property
    def complete(self) -> bool:
        """Whether every rank has answered."""
        return len(self.answers) == self.ranks and None not in self.answers.values()

    @property
    def timed_out(self) -> bool:
        """Whether ranks were stuck for all of the watch, and not because another had failed."""
        given = [answer for answer in self.answers.values() if answer is None or not answer.passed]
        return not given and not self.complete

    @property
    def usable(self) -> bool:
        """Whether every rank can take another example."""
        return self.complete and all(a is not None and a.usable for a in self.answers.values())

    def settle(self) -> None:
        """Pass on what all ranks say alike: nothing, a rejected example, or a skipped test.

        Raises:
            FailedExampleError: some rank failed, died, or was stuck; or only some skipped.
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
        """How each rank fared, then the words of those that did not pass, each once."""
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
        """How a rank fared, in words."""
        kind = self._kind(rank)
        if kind == "died":
            fatal = "Fatal Python error: " in self.printed.get(rank, "")
            return "died" if rank == self._first_dead or fatal else _ENDED
        return _STATES.get(kind, kind)

    @property
    def _first_dead(self) -> int:
        """The rank because of which mpiexec ended the job, where that was said; else the first that
        was gone, though two may be gone at once."""
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
