"""Embeddings beside torch's, as SPMD programs. Needs torch.

Ranks import this module, and no test.
"""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from linop import TensorSpace
from linop.backends import Backend
from support.contracts.plans import mine
from support.layers.cases import Case, block, cut, grids, made, normal, same, same_parameters


@st.composite
def embeddings(draw: Any, most: int) -> Case:
    """Any embedding, on grids of at most so many workers."""
    ndim = draw(st.integers(1, 3))
    shape = tuple(draw(st.integers(1, 5)) for _ in range(ndim))
    rows, columns = draw(st.integers(1, 7)), draw(st.integers(1, 5))
    P_x, P_W = draw(grids(most, draw(st.integers(1, ndim)))), draw(grids(most, 2))
    P_y = draw(grids(most, draw(st.integers(1, ndim + 1))))
    options: dict[str, Any] = {
        "padding_idx": draw(st.none() | st.integers(-rows, rows - 1)),
        draw(st.sampled_from(["scale_grad_by_freq", "sparse"])): draw(st.booleans()),
    }
    if P_W.shape[1] == 1:
        options["max_norm"] = draw(st.sampled_from([None, 0.5, 1.0]))
    seed = draw(st.integers(0, 99))
    places = {"P_y": P_y, "P_W": P_W}
    return Case("Embedding", (P_x,), shape, (rows, columns), options, places, P_y, seed=seed)


def is_torch_s(backend: Backend, case: Case) -> None:
    """Result, gradient and table are those of torch.nn."""
    layer, twin = made(backend, case)
    generator = torch.Generator().manual_seed(case.seed)
    whole = torch.randint(case.arguments[0], case.shape, generator=generator)
    wanted = twin(whole)
    upstream = normal(tuple(wanted.shape), case.seed)
    wanted.backward(upstream)
    (P_x,), P_W = case.partitions, layer.P_W
    P_y = case.output or P_x
    x = None
    if mine(backend) in P_x:
        x = whole[cut(case.shape, P_x, case.seed).slices(mine(backend))]
    y = layer(x)
    axes = [0, wanted.ndim - 1] if P_y.ndim == 2 else None
    Y = TensorSpace(tuple(wanted.shape), P_y, axes=axes)
    if mine(backend) in P_y:
        same(y, block(Y, wanted, backend))
    y.backward(block(Y, upstream, backend).reshape(y.shape))
    same_parameters(layer, twin)  # max_norm changes them
    if mine(backend) in P_W:
        where = layer.spaces["weight"].slices(mine(backend))
        gradient = layer.weight.grad
        if 0 not in gradient.shape:
            assert gradient.is_sparse == case.options.get("sparse", False)
        same(gradient.to_dense(), twin.weight.grad.to_dense()[where])
