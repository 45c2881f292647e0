"""Faults of gradients, in the words of the mesh, from few numbers of each worker.

A gradient that is a multiple of the twin's was summed over an axis too often, or divided; one whose
sum over an axis is the twin's was not summed. Sums are compared by scalar products with a vector of
random numbers, which are equal for different tensors with probability 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import isclose, isfinite, prod
from typing import NamedTuple

from linop.errors import LinopError

MOST = 6
"""Parameters that are named in one sentence."""


class GradientError(LinopError, AssertionError):
    """Losses or gradients of a parallel model are not those of its sequential twin.

    Example:
        Means of each worker's two rows, summed, are twice the mean of all four:

        >>> import copy
        >>> twin, batch = torch.nn.Linear(2, 1), (torch.ones(4, 2), torch.zeros(4, 1))
        >>> def program(backend):
        ...     model = strategies.DataParallel(copy.deepcopy(twin), reduction="sum")
        ...     strategies.check(model, twin, batch, torch.nn.MSELoss())
        >>> try:
        ...     linop.launch(program, workers=2)
        ... except strategies.GradientError as error:
        ...     print(error)
        check: the loss is 2.000 × the twin's: summed over dp of 2; all gradients are ...
    """


class Finding(NamedTuple):
    """A gradient on a worker, beside the twin's.

    Attributes:
        difference: the largest one, relative to the twin's largest.
        at: the element that has it, in the whole parameter.
        pair: the gradient there, and the twin's.
        ratio: to the twin's, by least squares; None if that is zero.
        rest: what is left of the difference if the ratio is taken out, relative.
        product, twins: the scalar products with random numbers, relative to the largest summand.
        absent: there is no gradient.
    """

    difference: float
    at: tuple[int, ...]
    pair: tuple[float, float]
    ratio: float | None
    rest: float
    product: float
    twins: float
    absent: bool


@dataclass
class Everyone:
    """Findings of all workers.

    Args:
        axes: sizes by name.
        groups: by name of an axis, the groups of workers along it.
        tolerance: of relative differences.
        found: by parameter, the findings of the workers that have it.
    """

    axes: Mapping[str, int]
    groups: Mapping[str, Sequence[tuple[int, ...]]]
    places: Sequence[str]
    """By worker: its number, and its coordinates."""
    tolerance: float
    found: Mapping[str, Mapping[int, Finding]] = field(default_factory=dict)
    exact: bool = False
    """True if any difference is a fault; the tolerance then tells which one."""

    @property
    def digits(self) -> int:
        """Of numbers that differ: all of them, if these are of the last bits."""
        return 17 if self.exact else 6

    def largest(self) -> float:
        """The largest relative difference."""
        every = (one.difference for each in self.found.values() for one in each.values())
        return max(every, default=0.0)

    def faults(self) -> Iterator[str]:
        """Sentences, of parameters with the same fault one."""
        said: dict[str, list[str]] = {}
        limit = 0.0 if self.exact else self.tolerance
        for name, each in self.found.items():
            off = {w: f for w, f in each.items() if not f.difference <= limit}
            if off:
                said.setdefault(self._fault(each, off), []).append(name)
        for fault, names in said.items():
            yield f"{_named(names, len(self.found))}{fault}"

    def _fault(self, each: Mapping[int, Finding], off: Mapping[int, Finding]) -> str:
        where = "" if len(off) == len(each) else self._on(off)
        if all(one.absent for one in off.values()):
            return f" are absent{where}, and the twin's are not zero"
        bad = {w: one for w, one in off.items() if not isfinite(one.difference)}
        if bad:
            return f" are not finite{self._on(bad)}"
        return self._multiple(each, off, where) or self._terms(each) or self._largest(off)

    def _multiple(self, each: Mapping[int, Finding], off: Mapping[int, Finding], where: str) -> str:
        ratios = [one.ratio for one in off.values() if one.ratio is not None]
        level = 10 * self.tolerance
        if not ratios or any(one.rest > level for one in off.values()):
            return ""
        if not all(isclose(ratio, ratios[0], rel_tol=level) for ratio in ratios):
            return ""
        if isclose(ratios[0], 1, rel_tol=level):
            return ""
        return f" are {multiple(ratios[0], self.axes, level)}{where}"

    def _terms(self, each: Mapping[int, Finding]) -> str:
        """If the sum over an axis, or several, is the twin's: which."""
        for name in self.groups:
            if all(self._sums(each, group) for group in self.groups[name] if {*group} & {*each}):
                return (
                    f" are terms of the twin's, which is their sum over "
                    f"{_sized(name, self.axes)}: not summed"
                )
        return ""

    def _sums(self, each: Mapping[int, Finding], group: Sequence[int]) -> bool:
        if not {*group} <= {*each}:
            return False
        first = each[group[0]].twins
        level = 10 * self.tolerance * len(group)
        if any(abs(each[w].twins - first) > level for w in group):
            return False  # they have different parts
        return abs(sum(each[w].product for w in group) - first) <= level

    def _largest(self, off: Mapping[int, Finding]) -> str:
        worker = max(off, key=lambda w: off[w].difference)
        one = off[worker]
        return (
            f" differ by up to {one.difference:.2e} of the largest, at {one.at} on "
            f"{self.places[worker]}: {one.pair[0]:.{self.digits}g}, the twin's "
            f"{one.pair[1]:.{self.digits}g}"
        )

    def _on(self, off: Mapping[int, Finding]) -> str:
        return " on " + ", ".join(self.places[w] for w in [*off][:MOST])


def multiple(ratio: float, axes: Mapping[str, int], level: float) -> str:
    """A ratio to the twin's, and the axes that have such a number of workers."""
    fitting = []
    for several in range(1, len(axes) + 1):
        for names in combinations(axes, several):
            size = prod(axes[name] for name in names)
            words = " and ".join(_sized(name, axes) for name in names)
            if size > 1 and isclose(ratio, size, rel_tol=level):
                fitting.append(f"summed over {words}")
            elif size > 1 and isclose(ratio, 1 / size, rel_tol=level):
                fitting.append(f"divided by {words}")
    known = ", ".join(_sized(name, axes) for name in axes) or "no axes"
    why = " or ".join(fitting) or f"not the size of an axis ({known})"
    return f"{ratio:.3f} × the twin's: {why}"


def _sized(name: str, axes: Mapping[str, int]) -> str:
    return f"{name} of {axes[name]}"


def _named(names: Sequence[str], of: int) -> str:
    """The subject of a sentence."""
    if len(names) == 1:
        return f"all gradients of `{names[0]}`"
    if len(names) == of:
        return "all gradients"
    more = f" and {len(names) - MOST} others" if len(names) > MOST else ""
    return "all gradients of " + ", ".join(f"`{name}`" for name in names[:MOST]) + more
