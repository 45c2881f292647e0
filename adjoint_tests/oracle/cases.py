"""Cases: what was drawn, as text, and a check; drawers make them of a random generator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random


class WrongError(Exception):
    """linop did something other than the oracle."""


@dataclass(frozen=True)
class Case:
    """One comparison of linop with the oracle.

    Attributes:
        number: of the kind of fault that it looks for, in `KINDS`.
        text: what was drawn.
        check: raises `WrongError` where linop is wrong, `RefusedError` of linop's own where it says
            that it cannot do it.
        seconds: in which the check has to return.
    """

    number: int
    text: str
    check: Callable[[], None]
    seconds: float = 60.0


Drawer = Callable[[Random], Case]

KINDS = {
    1: "local operators are their matrices",
    2: "inner products of integers",
    3: "whose an inner product is",
    4: "real-linear operators",
    5: "wrong operators of other people are found",
    6: "casts lose nothing silently",
    7: "no gradient stays no gradient",
    8: "random numbers belong to the tensor",
    9: "functions along a cut dimension",
    10: "parts of parameters are not taken for the whole",
    11: "equality of operators that round",
    12: "right operators of every dtype pass",
    13: "means over targets",
    14: "keys of states",
    15: "files are written as torch.save writes them",
    16: "hostile checkpoints",
    17: "ports",
    22: "shared expressions",
    23: "simplification is complete",
    24: "direct sums",
}
"""Kinds of faults, by number."""


def want(condition: object, text: str) -> None:
    """Raise `WrongError` with the text unless the condition holds."""
    if not condition:
        raise WrongError(text)
