"""The factory of operators that wrap PyLops's."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

import linop
from linop import LinearOperator, Region, Space
from linop.testing.describing import Description, dtype_of, holders, seeds, whole_numbers
from linop.testing.factories import operator_factory


@st.composite
def _vectors(draw: st.DrawFn, workers: int) -> Description:
    return {
        "size": draw(st.integers(2, 8)),
        "to": draw(holders(workers)),
        "dtype": draw(st.sampled_from(("float64", "float32", "complex128", "complex64"))),
        "kind": draw(st.sampled_from(["difference", "restriction", "padding", "matrix"])),
        "seed": draw(seeds),
    }


@operator_factory(_vectors, pure=False)
def of_pylops(size: Any, to: Any, dtype: Any, kind: Any, seed: Any) -> LinearOperator:
    import pylops  # it imports torch: seconds on each rank of each job

    A: Any
    if kind == "difference":
        A = pylops.FirstDerivative(size, kind="forward", dtype=dtype)
    elif kind == "restriction":
        A = pylops.Restriction(size, np.arange(seed % 2, size, 2), dtype=dtype)
    elif kind == "padding":
        A = pylops.Pad(size, (seed % 3, 1), dtype=dtype)
    else:
        A = pylops.MatrixMult(whole_numbers((3, size), dtype, seed), dtype=dtype)
    domain = Space(Region("x", size, to), dtype_of(dtype))
    return linop.local_operators.from_scipy(A, domain)
