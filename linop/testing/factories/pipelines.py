"""Factories of operators with several stages that send messages, separated by local maps."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from hypothesis import strategies as st

import linop
from linop import LinearOperator, Space
from linop.testing.describing import (
    COMPUTED,
    Description,
    seeds,
    shapes,
    tensor_of,
    whole_numbers,
)
from linop.testing.factories.collectives import acting
from linop.testing.factories.registry import build, describe, operator_factory


@st.composite
def _pipelines(draw: st.DrawFn, workers: int) -> Description:
    """Three or four block decompositions of one global tensor, a seed, and a direction."""
    shape = draw(shapes(draw(st.integers(1, 3)), 4))
    dtype = draw(st.sampled_from(COMPUTED))
    options: dict[str, Any] = {"shape": shape, "dtypes": (dtype,), "roles": ("split",)}
    cuts = [
        draw(acting(workers, "split", len(shape), name=name, **options)) for name in draw(_names)
    ]
    return {"cuts": tuple(cuts), "seed": draw(seeds), "back": draw(st.booleans())}


_names = st.sampled_from(["xyz", "wxyz"])


@operator_factory(_pipelines, pure=False)
def pipeline(cuts: Any, seed: Any, back: Any) -> LinearOperator:
    """Repartitions from each decomposition to the next, with a diagonal before each.

    Args:
        back: compose with the adjoint, too.
    """
    first, *others = map(tensor_of, cuts)
    op, now = linop.identity(first), first
    for k, cut in enumerate(others):
        op = linop.repartition(now, cut) @ scaled(now, seed + k) @ op
        now = cut
    return op.H @ op if back else op


@operator_factory(_pipelines, pure=False)
def in_steps(cuts: Any, seed: Any, back: Any) -> LinearOperator:
    """Repartitions from each decomposition to the next, run one by one."""
    spaces = list(map(tensor_of, cuts))
    steps = [linop.repartition(a, b) for a, b in pairwise(spaces)]
    op = linop.in_steps(*reversed(steps))
    return linop.in_steps(op.H, op) if back else op


_STEPS = ("recurrence", "twice", "with its adjoint", "squared")


@st.composite
def _shared(draw: st.DrawFn, workers: int) -> Description:
    """Two block decompositions of one global tensor, a seed, and what is done with what is there
    already: once each, with so many steps of a recurrence that a tree would be long."""
    described = draw(_pipelines(workers))
    steps = draw(st.lists(st.sampled_from(_STEPS), min_size=1, max_size=3, unique=True))
    return {**described, "cuts": described["cuts"][:2], "steps": tuple(steps)}


@operator_factory(_shared, pure=False)
def shared_operands(cuts: Any, seed: Any, back: Any, steps: Any) -> LinearOperator:
    """Sums and products that share their operands; of S = R* D R for a repartition R and a diagonal
    D, or (without `back`) of the diagonal alone."""
    first, second = map(tensor_of, cuts)
    R = linop.repartition(first, second)
    S = R.H @ scaled(second, seed) @ R if back else scaled(first, seed)
    before, op = linop.identity(first), S
    for step in steps:
        if step == "recurrence":
            for _ in range(4):
                before, op = op, S @ op - before
        elif step == "squared":
            op = op @ op
        else:
            op = op + (op if step == "twice" else op.H)
    return op


_FRAMES = (
    "broadcast",
    "halo_exchange",
    "all_gather",
    "ring_all_reduce",
    "ring_all_gather",
    "scatter",
    "shift",
)


@st.composite
def _framed(draw: st.DrawFn, workers: int) -> Description:
    """A collective's name and description, and a seed."""
    name = draw(st.sampled_from(_FRAMES))
    described = describe(name, workers).filter(lambda d: d["source"]["dtype"] in COMPUTED)
    return {"name": name, "described": draw(described), "seed": draw(seeds)}


@operator_factory(_framed, pure=False)
def there_and_back(name: Any, described: Any, seed: Any) -> LinearOperator:
    """C* D C for a collective C and a diagonal D."""
    op = build(name, described)
    return op.H @ scaled(op.codomain, seed) @ op


def scaled(space: Space, seed: int) -> LinearOperator:
    """The direct sum of a diagonal on each region."""
    blocks = (
        linop.local_operators.diagonal(
            whole_numbers(region.shape, space.dtype, seed), Space(region, space.dtype)
        )
        for region in space.regions
    )
    return linop.direct_sum(*blocks)
