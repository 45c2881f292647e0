"""The report of a pair of a forward function and its adjoint on several ranks: data and text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from linop.testing.parallel.lifting.naming import with_article


@dataclass(frozen=True)
class Movement:
    """A collective or a message of a function, on all ranks.

    Attributes:
        text: in words, such as ``broadcast from rank 0 over ranks 0, 1``.
        line: of the program, ``file:line``.
    """

    text: str
    line: str = ""

    def __str__(self) -> str:
        return f"{self.text} ({self.line})" if self.line else self.text


@dataclass(frozen=True)
class Trial:
    """A pair between two spaces.

    Attributes:
        domain, codomain: forms of the spaces: ``each rank's own``, or ``replicated`` and where.
        passed: True if the functions are adjoint there.
        wrong: the number of wrong entries of the adjoint's matrix; -1 if it was not made.
        text: a wrong entry, by rank and index.
        arrives: True if the adjoint is known to bring all elements to the ranks to which the
            transpose of the forward does, and no others: numbers are wrong, not the movements.
        factor: k, if the adjoint is k times the transpose of the forward.
        wanted: the adjoint of the forward between these spaces, in words; empty if it is not known.
        is_local: True if that is known to need no communication.
        lost: pairs of ranks of which all wrong entries are, of the first one's elements on the
            second one, where they are zero; empty if wrong ones are others.
        is_zero: True if the forward is zero there, as spaces are that nobody has in mind.
    """

    domain: str
    codomain: str
    passed: bool
    wrong: int = -1
    text: str = ""
    arrives: bool = False
    factor: float = 1.0
    wanted: str = ""
    is_local: bool = False
    lost: tuple[tuple[int, int], ...] = ()
    is_zero: bool = False

    @property
    def between(self) -> str:
        """The spaces, in words."""
        return f"x {self.domain}, y {self.codomain}"

    def __str__(self) -> str:
        verdict = "adjoint" if self.passed else f"NOT adjoint: {self.text}"
        return f"{self.between}: {verdict}"


@dataclass(frozen=True)
class PairReport:
    """The result of a check of ``forward(x, comm)`` and ``adjoint(y, comm)``. True if they are an
    operator and its adjoint.

    Attributes:
        passed: the verdict.
        evidence: what was compared.
        trials: the spaces between which the pair was compared, the nearest to being right first.
        forward, adjoint: the collectives of the two functions.
        operators: operators that are missing or too many; empty if the pair is right.
        faults: what is wrong besides, such as a changed argument.
        operator, adjoint_operator: the two functions as linop's operators, in its notation; empty
            if they are not known.
    """

    program: str
    workers: int
    passed: bool
    evidence: str
    trials: tuple[Trial, ...]
    forward: tuple[Movement, ...]
    adjoint: tuple[Movement, ...]
    operators: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    operator: str = ""
    adjoint_operator: str = ""
    seconds: float = field(default=0.0, compare=False)

    def __bool__(self) -> bool:
        return self.passed

    def __str__(self) -> str:
        verdict = (
            "an operator and its adjoint" if self.passed else "NOT an operator and its adjoint"
        )
        lines = [f"{self.program} on {self.workers} ranks: {verdict}"]
        if self.trials:
            lines.append(f"  spaces:   {self.trials[0]}")
        lines.append(f"  compared: {self.evidence}")
        for name, each in (("forward", self.forward), ("adjoint", self.adjoint)):
            text = f"  {name}:  {', then '.join(map(str, each)) or 'no communication'}"
            wanted = self.trials[0].wanted if self.trials and name == "forward" else ""
            lines.append(f"{text}; its adjoint is {with_article(wanted)}" if wanted else text)
        lines += [f"  operator: {one}" for one in self.operators]
        lines += [f"  fault:    {one}" for one in self.faults]
        lines += [f"  between other spaces: {one}" for one in self.trials[1:]]
        return "\n".join([*lines, *(f"  note: {one}" for one in self.notes)])

    def as_dict(self) -> dict[str, Any]:
        """The report as data for JSON."""
        return {
            **vars(self),
            **{
                name: [vars(one) for one in getattr(self, name)]
                for name in ("trials", "forward", "adjoint")
            },
            **{name: list(getattr(self, name)) for name in ("operators", "faults", "notes")},
        }
