"""Normalisation beside torch's, as SPMD programs. Needs torch.

Ranks import this module, and no test.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from linop.backends import Backend
from support.contracts.plans import mine
from support.layers.cases import Case, block, cut, grids, made, normal, same


@st.composite
def norms(draw: Any, most: int) -> Case:
    """Any normalisation, on grids of at most so many workers."""
    kind = draw(st.sampled_from(["Channels", "LayerNorm", "RMSNorm", "GroupNorm", "Response"]))
    if kind == "Channels":
        return draw(channel_norms(most))
    if kind in ("GroupNorm", "Response"):
        return draw(groups_or_neighbours(most, kind))
    ndim = draw(st.integers(1, 4))
    shape = tuple(draw(st.integers(1, 5)) for _ in range(ndim))
    last = draw(st.integers(1, ndim))
    options: dict[str, Any] = {"elementwise_affine": draw(st.booleans())}
    if kind == "LayerNorm":
        options["bias"] = draw(st.booleans())
    else:
        options["eps"] = draw(st.sampled_from([None, 1e-3]))
    # A grid of two axes splits the first and the last dimension.
    grid = draw(grids(most, ndim if ndim < 3 else draw(st.sampled_from([1, 3, ndim]))))
    seed = draw(st.integers(0, 99))
    return Case(kind, (grid,), shape, (shape[-last:],), options, kept=ndim, seed=seed)


@st.composite
def groups_or_neighbours(draw: Any, most: int, kind: str) -> Case:
    """Normalisation of groups of channels, or by neighbouring ones; cut anywhere."""
    space = [draw(st.integers(1, 4)) for _ in range(draw(st.integers(1, 3)))]
    groups, each = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    shape = draw(st.integers(1, 3)), groups * each, *space[1:], space[0] + 1
    grid = draw(grids(most, draw(st.integers(1, len(shape)))))
    seed = draw(st.integers(0, 99))
    if kind == "GroupNorm":
        arguments: tuple[Any, ...] = (groups, groups * each)
        options: dict[str, Any] = {"affine": draw(st.booleans())}
        return Case(kind, (grid,), shape, arguments, options, kept=len(shape), seed=seed)
    options = {"alpha": 0.5, "k": draw(st.sampled_from([1.0, 2.0]))}
    arguments = (draw(st.integers(1, 7)),)
    name = "LocalResponseNorm"
    return Case(name, (grid,), shape, arguments, options, kept=len(shape), seed=seed)


@st.composite
def channel_norms(draw: Any, most: int) -> Case:
    """Batch and instance normalisation; with two values for each mean at least."""
    kind = draw(st.sampled_from(["Batch", "Instance"]))
    space = draw(st.integers(0 if kind == "Batch" else 1, 3))
    shape = draw(st.integers(2, 5)), *(draw(st.integers(1, 4)) for _ in range(1 + space))
    if kind == "Instance":
        shape = (*shape[:-1], shape[-1] + 1)
    options = {
        "momentum": draw(st.sampled_from([0.1, 0.5, None])),
        "affine": draw(st.booleans()),
        "track_running_stats": draw(st.booleans()),
    }
    grid = draw(grids(most, draw(st.integers(1, len(shape)))))
    name = f"{kind}Norm{max(space, 1)}d"
    seed = draw(st.integers(0, 99))
    return Case(name, (grid,), shape, (shape[1],), options, kept=len(shape), seed=seed)


def keeps_statistics(backend: Backend, case: Case) -> None:
    """After some batches, running statistics are the twin's, and so are results by them."""
    layer, twin = made(backend, case)
    P_x, worker = case.partitions[0], mine(backend)
    for step in range(5):
        if step == 4:
            layer.eval()
            twin.eval()
        whole = normal(case.shape, case.seed + step) * (1 + step) + step
        X = cut(case.shape, P_x, case.seed + step)  # cut in another way every time
        y, wanted = layer(block(X, whole, backend)), twin(whole)
        if worker in P_x:
            same(y, block(X, wanted, backend))
    ours, theirs = dict(layer.named_buffers()), dict(twin.named_buffers())
    assert set(ours) == (set(theirs) if worker in P_x else set())
    for name, buffer in ours.items():
        assert layer.spaces[name].global_shape == theirs[name].shape
        same(buffer, theirs[name][layer.spaces[name].slices(worker)])
