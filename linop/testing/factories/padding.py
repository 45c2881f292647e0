"""The factory of padding, including cropping by negative widths."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

import linop
from linop import LinearOperator
from linop.testing.describing import Description, tensor_of, tensors
from linop.testing.factories.registry import operator_factory


@st.composite
def _pads(draw: st.DrawFn, workers: int) -> Description:
    source = draw(tensors(workers))
    mode = draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"]))
    return {
        "source": source,
        "widths": tuple(draw(widths(n, mode)) for n in source["shape"]),
        "mode": mode,
    }


@st.composite
def widths(draw: st.DrawFn, n: int, mode: str) -> tuple[int, int]:
    """(left, right) widths of a dimension of extent n, valid in the mode: up to 3, or negative."""
    cut = draw(st.integers(0, n)), draw(st.integers(0, n))
    left = -cut[0] if draw(st.booleans()) else 0
    right = -min(cut[1], n + left) if draw(st.booleans()) else 0
    most = {"reflect": n - 1, "circular": n + left + right, "replicate": 3 if n else 0}
    grown = st.integers(0, max(0, min(3, most.get(mode, 3))))
    return left or draw(grown), right or draw(grown)


@operator_factory(_pads)
def pad(source: Any, widths: Any, mode: Any) -> LinearOperator:
    return linop.pad(tensor_of(source), widths, mode)
