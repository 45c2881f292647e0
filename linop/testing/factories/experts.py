"""Factories of dispatch to experts and its combination, by drawn routings."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

import linop
from linop import LinearOperator, Routing
from linop.testing.describing import COMPUTED, MOVED, Description, grids, tensor_of, tensors
from linop.testing.factories.registry import operator_factory


@st.composite
def routings(draw: st.DrawFn, tokens: int, most: int = 8) -> Description:
    """Experts of each token: anywhere, or all to one."""
    experts, k = draw(st.integers(1, most)), draw(st.integers(1, 3))
    some = st.integers(0, experts - 1)
    one = draw(st.none() | some)
    each = st.lists(some if one is None else st.just(one), min_size=tokens * k, max_size=tokens * k)
    capacity = draw(st.none() | st.integers(0, 1 + 2 * tokens * k // experts))
    return {"indices": tuple(draw(each)), "k": k, "experts": experts, "capacity": capacity}


def routing_of(described: Description) -> Routing:
    """The routing of a description."""
    indices = np.array(described["indices"], np.int64).reshape(-1, described["k"])
    return Routing(indices, described["experts"], described["capacity"])


@st.composite
def _tokens(draw: st.DrawFn, workers: int, dtypes: Any = MOVED) -> Description:
    grid = draw(grids(workers, most=2))
    rank = draw(st.integers(1, 2))
    source = draw(tensors(workers, grid=grid, ndim=rank, dtypes=dtypes))
    return {"source": source, "routing": draw(routings(source["shape"][0]))}


@operator_factory(_tokens)
def dispatch(source: Any, routing: Any) -> LinearOperator:
    return linop.dispatch(tensor_of(source), routing_of(routing))


@st.composite
def _gated(draw: st.DrawFn, workers: int) -> Description:
    described = draw(_tokens(workers, COMPUTED))
    count = len(described["routing"]["indices"])
    gates = draw(st.lists(st.integers(-3, 3), min_size=count, max_size=count))
    return described | {"gates": tuple(gates)}


@operator_factory(_gated, pure=False)
def combine(source: Any, routing: Any, gates: Any) -> LinearOperator:
    given = np.array(gates, np.int64).reshape(-1, routing["k"])
    return linop.combine(tensor_of(source), routing_of(routing), given)
