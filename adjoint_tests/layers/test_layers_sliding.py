"""Convolution and pooling over blocks are torch's, forward and back."""

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

from linop import Partition
from support.layers.cases import Case, grids, is_its_twin
from support.requirements import needs_mpi
from support.workers import on_ranks, on_threads

MODES = ("zeros", "reflect", "replicate", "circular")


@st.composite
def convolutions(draw: Any, most: int) -> Case:
    """Any convolution, on grids of at most so many workers."""
    ndim = draw(st.integers(1, 3))
    P_x, P_y = draw(grids(most, ndim + 2)), draw(grids(most, ndim + 2))
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    work: Any = draw(st.none() | grids(most, ndim + draw(st.sampled_from([2, 3]))))
    if work is not None and groups > 1:
        work = _merged(work, ndim)
    each = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    split = P_x.shape[1] if work is None else work.shape[-ndim - 2]
    # With groups, cuts are between them.
    channels = [groups * n * (split if groups > 1 else 1) for n in each]
    groups = groups * (split if groups > 1 else 1)
    size = [draw(st.integers(1, 3)) for _ in range(ndim)]
    dilation = [draw(st.integers(1, 2)) for _ in range(ndim)]
    reach = [d * (k - 1) + 1 for k, d in zip(size, dilation, strict=True)]
    mode = draw(st.sampled_from(MODES))
    padding: Any = [draw(st.integers(0, 2)) for _ in range(ndim)]
    stride: Any = [draw(st.integers(1, 3)) for _ in range(ndim)]
    if draw(st.booleans()):
        padding, stride = draw(st.sampled_from(["same", "valid"])), 1
    space = [r + 2 + draw(st.integers(0, 5)) for r in reach]
    return Case(
        f"Conv{ndim}d",
        (P_x,),
        (draw(st.integers(1, 3)), channels[0], *space),
        (channels[0], channels[1], tuple(size)),
        {
            "stride": stride,
            "padding": padding,
            "dilation": tuple(dilation),
            "groups": groups,
            "bias": draw(st.booleans()),
            "padding_mode": mode,
        },
        {"P_y": P_y, "P_W": work},
        P_y,
        seed=draw(st.integers(0, 99)),
    )


def _merged(work: Partition, ndim: int) -> Partition:
    """With the axis of input channels in that of the output channels."""
    *batch, outputs, inputs = work.shape[: work.ndim - ndim]
    return Partition((*batch, outputs * inputs, 1, *work.shape[work.ndim - ndim :]), work.workers)


@st.composite
def poolings(draw: Any, most: int) -> Case:
    """Any pooling, on grids of at most so many workers."""
    ndim, kind = draw(st.integers(1, 3)), draw(st.sampled_from(["Max", "Avg"]))
    size = [draw(st.integers(1, 4)) for _ in range(ndim)]
    options: dict[str, Any] = {
        "stride": draw(st.none() | st.integers(1, 4)),
        "padding": tuple(draw(st.integers(0, k // 2)) for k in size),
        "ceil_mode": draw(st.booleans()),
    }
    dilation = 1
    if kind == "Max":
        dilation = options["dilation"] = draw(st.integers(1, 2))
    else:
        options["count_include_pad"] = draw(st.booleans())
        if ndim > 1:
            options["divisor_override"] = draw(st.none() | st.integers(1, 5))
    space = [dilation * (k - 1) + 1 + draw(st.integers(0, 6)) for k in size]
    P_x = draw(grids(most, ndim + 2))
    shape = draw(st.integers(1, 3)), draw(st.integers(1, 3)), *space
    seed = draw(st.integers(0, 99))
    return Case(f"{kind}Pool{ndim}d", (P_x,), shape, (tuple(size),), options, kept=2, seed=seed)


@given(convolutions(6))
def test_convolutions_on_threads(case: Case) -> None:
    on_threads(case.workers, is_its_twin, case)


@given(poolings(6))
def test_poolings_on_threads(case: Case) -> None:
    on_threads(case.workers, is_its_twin, case)


@needs_mpi
@pytest.mark.timeout(300)
@settings(max_examples=12)
@given(convolutions(4))
def test_convolutions_on_ranks(case: Case) -> None:
    on_ranks(case.workers, is_its_twin, case)


@needs_mpi
@pytest.mark.timeout(300)
@settings(max_examples=12)
@given(poolings(4))
def test_poolings_on_ranks(case: Case) -> None:
    on_ranks(case.workers, is_its_twin, case)
