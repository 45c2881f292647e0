"""Up- and down-sampling, and padding, over blocks are torch's, forward and back."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

import torch

import linop
from linop import LinopError, Partition, TensorSpace, launch
from linop.layers import Downsample
from linop.testing.factories.padding import widths
from support.layers.cases import Case, grids, is_its_twin, normal
from support.requirements import needs_mpi
from support.workers import on_ranks, on_threads

PADS = {
    "Constant": "zeros",
    "Zero": "zeros",
    "Reflection": "reflect",
    "Replication": "replicate",
    "Circular": "circular",
}
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
    assume(_has_its_adjoint(torch.nn.Upsample(**options), shape))
    return Case("Upsample", (P_x,), shape, (), options, kept=2, seed=seed)


def _has_its_adjoint(twin: Any, shape: tuple[int, ...]) -> bool:
    """Not so where torch rounds otherwise in backward: it has an output as long as the input, or
    twice so, for a copy of the nearest, whatever the factor."""
    x = normal(shape, 0).requires_grad_()
    y = twin(x)
    w = normal(tuple(y.shape), 1)
    y.backward(w)
    return bool(abs((y * w).sum() - (x * x.grad).sum()) < 1e-9)


@st.composite
def paddings(draw: Any, most: int) -> Case:
    """Any padding, with widths that cut off, on grids of at most so many workers."""
    ndim = draw(st.integers(1, 3))
    kind, mode = draw(st.sampled_from(sorted(PADS.items())))
    P_x = draw(grids(most, ndim + 2))
    space = [draw(st.integers(1, 6)) for _ in range(ndim)]
    # torch wants something left.
    pairs = [draw(widths(n, mode).filter(lambda w, n=n: sum(w) + n > 0)) for n in space]
    padding = tuple(width for pair in reversed(pairs) for width in pair)
    arguments = (padding, draw(st.sampled_from([2.5, -1.0]))) if kind == "Constant" else (padding,)
    shape = draw(st.integers(1, 3)), draw(st.integers(1, 3)), *space
    seed = draw(st.integers(0, 99))
    return Case(f"{kind}Pad{ndim}d", (P_x,), shape, arguments, kept=2, seed=seed)


@given(paddings(6))
def test_padding_on_threads(case: Case) -> None:
    on_threads(case.workers, is_its_twin, case)


@given(upsamplings(6))
def test_upsampling_on_threads(case: Case) -> None:
    on_threads(case.workers, is_its_twin, case)


@needs_mpi
@pytest.mark.timeout(300)
@settings(max_examples=15)
@given(upsamplings(4) | paddings(4))
def test_resampling_and_padding_on_ranks(case: Case) -> None:
    on_ranks(case.workers, is_its_twin, case)


def test_where_torch_rounds_otherwise_in_backward_the_gradient_is_the_adjoint() -> None:
    x = torch.ones((1, 1, 2), dtype=torch.float64, requires_grad=True)
    y = linop.layers.Upsample(Partition((1, 1, 1)), scale_factor=1.2)(x)
    assert torch.equal(y, torch.nn.Upsample(scale_factor=1.2)(x))  # the first element twice
    y.sum().backward()
    assert x.grad.tolist() == [[[2, 0]]]
    image = torch.tensor([[[[1.0, 2.0]]]])  # in 2-D torch does not round it so
    y = linop.layers.Upsample(Partition((1, 1, 1, 1)), scale_factor=1.2)(image)
    assert torch.equal(y, torch.nn.Upsample(scale_factor=1.2)(image))


@given(grids(6, 4), st.tuples(*[st.integers(1, 9)] * 4), st.tuples(*[st.integers(1, 4)] * 2))
def test_downsampling_takes_every_stride_th(
    P: Partition, shape: tuple[int, ...], stride: tuple[int, int]
) -> None:
    whole = normal(shape, 0).requires_grad_()
    wanted = whole[..., :: stride[0], :: stride[1]]
    upstream = normal(tuple(wanted.shape), 1)
    wanted.backward(upstream)
    X, Y = TensorSpace(shape, P), TensorSpace(tuple(wanted.shape), P)

    def main(backend: Any) -> None:
        layer = Downsample(P, stride)
        if backend.worker not in P:
            y = layer(torch.empty((shape[0], 0), dtype=torch.float64, requires_grad=True))
            y.backward(torch.empty_like(y))
            return
        x = whole.detach()[X.slices(backend.worker)].clone().requires_grad_()
        y = layer(x)
        assert torch.equal(y, wanted[Y.slices(backend.worker)])
        y.backward(upstream[Y.slices(backend.worker)])
        assert torch.equal(x.grad, whole.grad[X.slices(backend.worker)])

    launch(main, 1 + max(P.workers))


P2 = Partition((1, 1, 2))
MISTAKES: list[tuple[Any, Any, str]] = [
    (lambda: linop.layers.Upsample(P2), None, "either size or scale_factor should be defined"),
    (lambda: linop.layers.Upsample(P2, 3, mode="bilinear"), None, "nearest-exact, linear"),
    (lambda: linop.layers.Upsample(Partition((2,)), 3), None, "a grid of 3 axes expected"),
    (lambda: linop.layers.Upsample(P2, (3, 3)), None, "same number of spatial dimensions"),
    (lambda: linop.layers.Upsample(P2, 3), (1, 1, 2, 2), "batch, channels, and 1 of space"),
    (lambda: linop.layers.Upsample(P2, scale_factor=0.1), (1, 1, 2), "should be greater than 0"),
    (lambda: Downsample(P2, 0), None, "Downsample: stride"),
    (lambda: linop.layers.ReflectionPad1d(P2, 4), (1, 1, 2), "at most 3 each"),
    (lambda: linop.layers.CircularPad1d(P2, (4, -1)), (1, 1, 2), "at most 3 each"),
    (lambda: linop.layers.ZeroPad1d(P2, (-3, -2)), (1, 1, 2), "cut off more than"),
    (lambda: linop.layers.ZeroPad2d(P2, 1), None, "a grid of 4 axes expected"),
    (lambda: linop.layers.ZeroPad1d(P2, (1, 2, 3)), None, "a whole number expected, or 2"),
    (lambda: linop.layers.ConstantPad1d(P2, 1, None), None, "a number expected"),
]


@pytest.mark.parametrize(("make", "shape", "words"), MISTAKES)
def test_a_mistake_is_the_same_error_on_every_worker(make: Any, shape: Any, words: str) -> None:
    def main(backend: Any) -> str:
        with pytest.raises(LinopError) as caught:
            make()(torch.ones(shape))
        return str(caught.value)

    said = launch(main, 2)
    assert words in said[0]
    assert said[0] == said[1]
