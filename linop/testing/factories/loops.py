"""Factories of time loops, of steps that send messages."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

import linop
from linop import LinearOperator
from linop.testing.describing import (
    COMPUTED,
    Description,
    seeds,
    shapes,
    tensor_of,
)
from linop.testing.factories.collectives import acting
from linop.testing.factories.pipelines import scaled
from linop.testing.factories.registry import operator_factory

ENDS = ("repeat", "signals", "records", "both", "all")
"""The ends of a loop beside the state: nothing, sources, receivers, both, or these and the initial
and the final state."""


@st.composite
def _loops(draw: st.DrawFn, workers: int) -> Description:
    """Three block decompositions of one global tensor: of the state, signals and records."""
    shape = draw(shapes(draw(st.integers(1, 2)), 3))
    dtype = draw(st.sampled_from(COMPUTED))
    options: dict[str, Any] = {"shape": shape, "dtypes": (dtype,), "roles": ("split",)}
    cuts = [draw(acting(workers, "split", len(shape), name=name, **options)) for name in "xyz"]
    return {
        "cuts": tuple(cuts),
        "n": draw(st.integers(0, 3)),
        "ends": draw(st.sampled_from(ENDS)),
        "seed": draw(seeds),
        "back": draw(st.booleans()),
    }


@operator_factory(_loops, pure=False)
def time_loop(cuts: Any, n: Any, ends: Any, seed: Any, back: Any) -> LinearOperator:
    """A loop of the step P* D P for a repartition P and a diagonal D; signals and records are
    repartitioned.

    Args:
        back: its adjoint, which runs backwards.
    """
    X, Y, Z = map(tensor_of, cuts)
    P = linop.repartition(X, Y)
    step = P.H @ scaled(Y, seed) @ P
    if ends == "repeat":
        op = linop.repeat(step, n)
    else:
        sources = None if ends == "records" else scaled(X, seed + 1) @ P.H
        receivers = None if ends == "signals" else linop.repartition(X, Z)
        whole = True if ends == "all" else None
        op = linop.timeloop(step, n, sources, receivers, initial=whole, final=whole)
    return op.H if back else op
