"""What a check found: a verdict, the worst case with its place, and how to see it again."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from linop.spaces.scalars import Scalar
from linop.spaces.space import Space


@dataclass(frozen=True)
class Element:
    """One element of a vector: its region, its index there, and who holds it."""

    region: str
    index: tuple[int, ...]
    workers: tuple[int, ...]

    def __str__(self) -> str:
        at = f"[{', '.join(map(str, self.index))}]" if self.index else ""
        return f"{self.region}{at} ({workers_text(self.workers)})"

    def as_dict(self) -> dict[str, Any]:
        return {"region": self.region, "index": list(self.index), "workers": list(self.workers)}


def element(space: Space, flat: int) -> Element:
    """The element at a position in the order of `Space.flatten`."""
    for region in space.regions:
        if flat < region.size:
            return element_in(space, region.name, flat)
        flat -= region.size
    raise IndexError(f"no element {flat} behind the last of {space}")


def element_in(space: Space, name: str, flat: int) -> Element:
    """The element at a position in a region, in C order."""
    region, index = space[name], []
    for extent in reversed(region.shape):
        flat, at = divmod(flat, extent)
        index.append(at)
    return Element(name, tuple(reversed(index)), region.workers)


def workers_text(workers: tuple[int, ...]) -> str:
    """``worker 1``, or ``workers 0, 1``."""
    return f"worker{'s' * (len(workers) > 1)} {', '.join(map(str, workers))}"


@dataclass(frozen=True)
class Worst:
    """The worst case: where it is, and the two numbers that should be the same.

    Attributes:
        text: all of it in words.
        source: the element of the argument that it comes from, if it is one.
        target: the element of the result that it shows in, if it is one.
        found, wanted: what is there, and what should be.
    """

    text: str
    source: Element | None = None
    target: Element | None = None
    found: Scalar | None = None
    wanted: Scalar | None = None

    def as_dict(self) -> dict[str, Any]:
        places = {"from": self.source, "to": self.target}
        return {
            "text": self.text,
            **{side: at.as_dict() if at else None for side, at in places.items()},
            "found": plain(self.found),
            "wanted": plain(self.wanted),
        }


@dataclass(frozen=True)
class Report:
    """What a check found. True if it passed; ``print`` shows all of it.

    Attributes:
        check: which check, on which backend.
        operator: what was checked.
        error: the largest error found: relative where numbers round, else absolute; infinite
            where there is nothing to compare.
        tolerance: the largest error that passes.
        compared: what was compared.
        worst: the worst case of a check that failed.
        reproduce: a call that does it again; ``op`` is what was checked.
    """

    check: str
    operator: str
    passed: bool
    error: float
    tolerance: float
    compared: str
    worst: Worst | None
    reproduce: str

    def __bool__(self) -> bool:
        return self.passed

    @property
    def details(self) -> str:
        """The worst case of a check that failed, else what was compared."""
        return self.compared if self.worst is None else self.worst.text

    def __str__(self) -> str:
        verdict = "passed" if self.passed else "FAILED"
        lines = [
            f"{self.check} {verdict} for {self.operator}: error {self.error:.3g}, "
            f"tolerance {self.tolerance:.3g}",
            f"  compared:  {self.compared}",
        ]
        if self.worst is not None:
            lines.append(f"  worst:     {self.worst.text}")
        return "\n".join([*lines, f"  reproduce: {self.reproduce}"])

    def as_dict(self) -> dict[str, Any]:
        """The same as plain data, fit for JSON: complex numbers are text, infinity is None."""
        return {
            "check": self.check,
            "operator": self.operator,
            "passed": self.passed,
            "error": plain(self.error),
            "tolerance": self.tolerance,
            "compared": self.compared,
            "worst": self.worst.as_dict() if self.worst else None,
            "reproduce": self.reproduce,
        }


def plain(number: Scalar | None) -> int | float | str | None:
    """A number as JSON can hold it."""
    if isinstance(number, complex):
        return str(number)
    return None if number is None or not math.isfinite(number) else number


def shown(number: Scalar) -> str:
    """A number as a report shows it: with what tells two numbers apart, and no more."""
    if isinstance(number, complex):
        return f"{number.real:.12g}{number.imag:+.12g}j"
    return f"{number + 0.0:.12g}" if isinstance(number, float) else str(number)  # -0 is 0
