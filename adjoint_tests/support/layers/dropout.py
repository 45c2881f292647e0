"""Masks of dropout, as SPMD programs. Needs torch.

Ranks import this module, and no test.
"""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

import linop
from linop import Partition
from linop.backends import Backend
from support.contracts.plans import mine
from support.layers.cases import WIDE, Case, block, cut, grids, normal, same


@st.composite
def dropouts(draw: Any, most: int) -> Case:
    """Any dropout, on grids of at most so many workers."""
    space = draw(st.integers(0, 3))
    ndim = 2 + space if space else draw(st.integers(1, 4))
    shape = tuple(draw(st.integers(1, 5)) for _ in range(ndim))
    p, seed = draw(st.sampled_from([0.0, 0.3, 0.5, 1.0])), draw(st.integers(0, 99))
    grid = draw(grids(most, draw(st.integers(1, ndim))))
    name = f"Dropout{space}d" if space else "Dropout"
    return Case(name, (grid,), shape, (p,), {"inplace": draw(st.booleans())}, seed=seed)


def two_masks(case: Case) -> tuple[list[Any], int]:
    """Dropout of ones by one worker alone, twice; and the next draw of its generator."""
    kind = getattr(linop.layers, case.layer)
    layer = kind(Partition((1,) * case.partitions[0].ndim), *case.arguments)
    torch.manual_seed(case.seed)
    # As arrays, which travel to ranks.
    masks = [layer(torch.ones(case.shape, dtype=WIDE)).detach().numpy() for _ in range(2)]
    return masks, int(torch.randint(1 << 40, ()))


def drops_the_same(backend: Backend, case: Case, masks: list[Any]) -> None:
    """The layer's masks are those, forward and back."""
    (P,), whole = case.partitions, normal(case.shape, case.seed)
    layer = getattr(linop.layers, case.layer)(P, *case.arguments, **case.options)
    torch.manual_seed(case.seed)
    for mask in map(torch.from_numpy, masks):
        X = cut(case.shape, P, case.seed)
        x = block(X, whole, backend, gradient=True)
        y = layer(x * 1 if case.options["inplace"] else x)
        y.sum().backward()
        if mine(backend) in P:
            same(y, block(X, whole * mask, backend))
            same(x.grad, block(X, mask, backend))
            same(x, block(X, normal(case.shape, case.seed), backend))
    z = normal(case.shape, 7)
    evaluated = layer.eval()(block(X, z, backend))
    if mine(backend) in P:
        same(evaluated, block(X, z, backend))


def leaves_the_generator(backend: Backend, case: Case, masks: list[Any], afterwards: int) -> None:
    """The same; and torch's generator draws next what it draws after one worker alone."""
    drops_the_same(backend, case, masks)
    assert int(torch.randint(1 << 40, ())) == afterwards
