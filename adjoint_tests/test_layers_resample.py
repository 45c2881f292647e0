"""Up- and down-sampling, and padding, over blocks are torch's, forward and back."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

from layer_cases import Case, grids, on_ranks, on_threads
from mpi_job import needs_mpi

LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}


@st.composite
def upsamplings(draw: Any, most: int) -> Case:
    """Any interpolation, up or down, on grids of at most so many workers."""
    ndim = draw(st.integers(1, 3))
    P_x = draw(grids(most, ndim + 2))
    smooth = [LINEAR[ndim], *(["bicubic"] if ndim == 2 else [])]
    mode = draw(st.sampled_from(["nearest", "nearest-exact", *smooth]))
    space = [draw(st.integers(1, 7)) for _ in range(ndim)]
    options: dict[str, Any] = {"mode": mode}
    if draw(st.booleans()):
        options["size"] = draw(st.integers(1, 9) | st.tuples(*[st.integers(1, 9)] * ndim))
    else:
        factors = st.sampled_from([2.0, 3.0, 1.5, 1.2, 2.3, 1.0, 1 / min(space)])
        options["scale_factor"] = draw(factors | st.tuples(*[factors] * ndim))
        options["recompute_scale_factor"] = draw(st.sampled_from([None, False, True]))
    if mode in smooth:
        options["align_corners"] = draw(st.sampled_from([None, False, True]))
    shape = draw(st.integers(1, 3)), draw(st.integers(1, 3)), *space
    seed = draw(st.integers(0, 99))
    return Case("Upsample", (P_x,), shape, (), options, kept=2, seed=seed)


@settings(max_examples=60)
@given(upsamplings(6))
def test_upsampling_on_threads(case: Case) -> None:
    on_threads(case)


@needs_mpi
@pytest.mark.timeout(300)
@settings(max_examples=15)
@given(upsamplings(4))
def test_upsampling_on_ranks(case: Case) -> None:
    on_ranks(case)
