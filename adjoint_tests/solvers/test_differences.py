"""Differences of blocks with halos: their matrix, on whole numbers, forward and adjoint."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from linop import Region, Space
from linop.solvers.prox.differences import differences
from linop.testing import check_adjoint, check_exact
from linop.testing.describing import dtype_of, seeds

dtypes = st.sampled_from(["float64", "float32", "float16", "int8", "complex64"])
blocks = st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=3)


@given(blocks, dtypes, seeds)
def test_functions_are_the_matrix(drawn: list[tuple[int, bool]], dtype: str, seed: int) -> None:
    block = tuple(n for n, _ in drawn)
    whole = tuple(n + (more and n > 0) for n, more in drawn)
    wider = Space(Region("x", whole), dtype_of(dtype))
    target = Space(Region("y", (len(block), *block)), dtype_of(dtype))
    D = differences(wider, target)
    x, y = wider.integers(seed), target.integers(seed + 1)
    M = D.to_matrix().toarray()
    assert (D(x)["y"].ravel() == (M @ x["x"].ravel()).astype(dtype)).all()
    assert (D.H(y)["x"].ravel() == (M.conj().T @ y["y"].ravel()).astype(dtype)).all()
    for d in range(len(block)):  # by NumPy
        inside = x["x"][tuple(slice(n + (k == d)) for k, n in enumerate(block))]
        found = np.diff(inside, axis=d)
        kept = tuple(slice(found.shape[d]) if k == d else slice(None) for k in range(len(block)))
        assert (D(x)["y"][d][kept] == found).all()
        assert np.count_nonzero(D(x)["y"][d]) == np.count_nonzero(found)
    assert check_adjoint(D) and check_exact(D)
