"""The inner loop of convolutions and stencils, in tiles of a few elements."""

from __future__ import annotations

import numpy as np
from hypothesis import given

import linop
from linop.local_operators import convolution
from linop.testing.describing import Description, seeds
from linop.testing.factories import build, describe
from support.contracts.stencils import small_tiles


@given(describe("convolution"), seeds)
def test_tiles_are_the_matrix(described: Description, seed: int) -> None:
    C = build("convolution", described)
    with small_tiles():
        for op in (C, C.H):
            x = op.domain.integers(seed)
            wanted = op.codomain.unflatten(op.to_matrix() @ op.domain.flatten(x))
            assert op(x).equals(wanted)


def test_an_infinite_weight_multiplies_no_padding() -> None:
    sides = linop.Region("x", 3), linop.Region("y", 3)
    C = convolution([np.inf, 1.0], *sides, padding=[(1, 0)])
    with small_tiles():
        assert C(np.array([1.0, 2, 3])).tolist() == [1, np.inf, np.inf]
        assert C.H(np.array([5.0, 2, 3])).tolist() == [np.inf, np.inf, 3]
