"""Reports of checks: the verdict, the worst case with the elements concerned, and the call that
reproduces it. Data and their text and JSON forms; nothing is checked here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from linop.spaces.scalars import Scalar
from linop.spaces.space import Space


@dataclass(frozen=True)
class Element:
    """One element of a vector: its region, its index there, and the workers that hold it.

    Example:
        >>> A, B = np.array([[1.0, 2.0], [0.0, 3.0]]), np.array([[1.0, 2.0], [5.0, 3.0]])
        >>> element = linop.testing.check_equal(A, B).worst.target
        >>> element.region, element.index, element.workers, str(element)
        ('y', (1,), (0,), 'y[1] (worker 0)')
    """

    region: str
    index: tuple[int, ...]
    workers: tuple[int, ...]

    def __str__(self) -> str:
        at = f"[{', '.join(map(str, self.index))}]" if self.index else ""
        return f"{self.region}{at} ({workers_text(self.workers)})"

    def as_dict(self) -> dict[str, Any]:
        return {"region": self.region, "index": list(self.index), "workers": list(self.workers)}


def element(space: Space, flat: int) -> Element:
    """The element at a position in the order of regions.

    Raises:
        IndexError: the space has fewer elements.
    """
    for region in space.regions:
        if flat < region.size:
            return element_in(space, region.name, flat)
        flat -= region.size
    raise IndexError(f"no element {flat} behind the last of {space}")


def element_in(space: Space, name: str, flat: int) -> Element:
    """The element at a position in the region called `name`, flattened in C order."""
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
    """The worst case: two numbers that should be equal, and the elements that they belong to.

    Attributes:
        text: the message, which has all of the other attributes.
        source: the element of the argument (the matrix's column); None if it is not a single one.
        target: the element of the result (the matrix's row); None if it is not a single one.
        found, wanted: the actual value and the expected one; None if they are no numbers.

    Example:
        >>> A, B = np.array([[1.0, 2.0], [0.0, 3.0]]), np.array([[1.0, 2.0], [5.0, 3.0]])
        >>> worst = linop.testing.check_equal(A, B).worst
        >>> str(worst.source), str(worst.target), float(worst.found), float(worst.wanted)
        ('x[0] (worker 0)', 'y[1] (worker 0)', 0.0, 5.0)
    """

    text: str
    source: Element | None = None
    target: Element | None = None
    found: Scalar | None = None
    wanted: Scalar | None = None

    def as_dict(self) -> dict[str, Any]:
        ends = {"from": self.source, "to": self.target}
        return {
            "text": self.text,
            **{side: at.as_dict() if at else None for side, at in ends.items()},
            "found": plain(self.found),
            "wanted": plain(self.wanted),
        }


@dataclass(frozen=True)
class Report:
    """The result of a check. True if the check passed; ``print`` shows all of it.

    Attributes:
        check: the name of the check, and of the backend.
        operator: the name of the checked operator.
        passed: the verdict.
        error: the largest error: relative if arithmetic rounds, otherwise absolute; infinite if no
            numbers could be compared.
        tolerance: the largest error that passes.
        compared: the two expressions that were compared.
        worst: the worst case; None if the check passed.
        reproduce: a call that repeats the failure, in which ``op`` is the checked operator.

    Example:
        >>> A, B = np.array([[1.0, 2.0], [0.0, 3.0]]), np.array([[1.0, 2.0], [5.0, 3.0]])
        >>> report = linop.testing.check_equal(A, B)
        >>> bool(report), report.check
        (False, 'equality on reference')
        >>> print(report)
        equality on reference FAILED for <2x2 ndarray with dtype=float64>: ...
          compared:  F x with G x
          worst:     from x[0] (worker 0) to y[1] (worker 0): F has 0, G has 5
          reproduce: linop.testing.check_equal(op, other, 'reference', seed=0, trials=1)
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
        """The text of the worst case; if the check passed, the expressions compared."""
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
        """The report as data for JSON: complex numbers become text, NaN and infinity None."""
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
    """A number as JSON can represent it: complex ones as text, NaN and infinity as None."""
    if isinstance(number, complex):
        return str(number)
    return None if number is None or not math.isfinite(number) else number


def plain_number(value: Any) -> Scalar:
    """A NumPy number, also a long double or one of another package, as one of Python's."""
    if isinstance(value, np.integer):
        return int(value)
    return complex(value) if isinstance(value, np.complexfloating) else float(value)


def shown(number: Scalar) -> str:
    """A number as text, floating ones with 12 significant digits."""
    if isinstance(number, complex):
        return f"{number.real:.12g}{number.imag:+.12g}j"
    return f"{number + 0.0:.12g}" if isinstance(number, float) else str(number)  # -0 is 0
