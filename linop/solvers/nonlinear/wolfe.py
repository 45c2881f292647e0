"""Line search for the strong Wolfe conditions, with a bounded number of evaluations (Nocedal &
Wright, Numerical Optimization, 2006, algorithms 3.5 and 3.6)."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

DECREASE, CURVATURE = 1e-4, 0.9
"""The constants of the two conditions, as in SciPy's line searches."""


@dataclass(frozen=True)
class Point:
    """A point of the line.

    Attributes:
        t: the step.
        value, slope: of the function there; the slope is 0 where the value is not finite.
        found: what the caller keeps of it.
    """

    t: float
    value: float
    slope: float
    found: Any = None


Evaluate = Callable[[float], Generator[Any, list[Any], Point]]


def search(
    evaluate: Evaluate, start: Point, t: float, most: int
) -> Generator[Any, list[Any], Point | None]:
    """A point that meets the conditions; after `most` evaluations the lowest one that meets the
    first; None if there is none.

    Args:
        evaluate: the point of a step, as a generator.
        start: the point of step 0; its slope is negative.
        t: the first step.
    """
    low, high = start, None
    # Values are exact to rounding: near a minimum a decrease is not seen before it is reached.
    slack = 1e-15 * abs(start.value)
    for _ in range(most):
        at = yield from evaluate(t)
        wanted = start.value + DECREASE * at.t * start.slope + slack
        if not at.value <= wanted or (at.value >= low.value + slack and low is not start):
            high = at
        elif abs(at.slope) <= -CURVATURE * start.slope:
            return at
        else:
            if at.slope * ((high.t if high else math.inf) - low.t) >= 0:
                high = low
            low = at
        t = 4 * low.t if high is None else _between(low, high)
    return None if low is start else low


def _between(low: Point, high: Point) -> float:
    """The minimizer of the cubic through two points, kept away from both; their middle if it has
    none, a tenth of the way where the value is not finite."""
    width = high.t - low.t
    if not math.isfinite(high.value):
        return low.t + 0.1 * width
    d = low.slope + high.slope - 3 * (high.value - low.value) / width
    square = d * d - low.slope * high.slope
    if not 0 <= square < math.inf:
        return low.t + 0.5 * width
    root = math.copysign(math.sqrt(square), width)
    bottom = high.slope - low.slope + 2 * root
    share = 1 - (high.slope + root - d) / bottom if bottom else 0.5
    return low.t + min(max(share, 0.1), 0.9) * width
