"""Models as they are, cut in space: one process's outputs and gradients; and what is refused."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import linop
from linop.errors import ArgumentError, BackendError, PartitionError, ShapeError
from linop.strategies import CutTensor, Mesh, spatial
from linop.strategies.space.dispatch import GatheredWarning
from support.models.packages import missing, torchvision
from support.requirements import needs_mpi
from support.strategies.spatial import (
    TOLERANCE,
    beside_data_parallel,
    beside_its_shards,
    difference,
    model_equals_one_process,
    noisy,
    noisy_on_ranks,
    strips_from,
    takes_blocks,
    unet,
    unet_equals_one_process,
)
from support.workers import on_ranks, on_threads

needs_torchvision = pytest.mark.skipif(bool(missing()), reason=missing() or "models")


def of_torchvision(name: str, size: int) -> tuple[nn.Module, list[Tensor]]:
    torchvision()
    from torchvision import models

    torch.manual_seed(0)
    net = getattr(models, name)(num_classes=5).double()
    for one in net.modules():
        if type(one).__name__ in ("Dropout", "StochasticDepth"):
            one.p = 0.0  # masks are not torch's: `test_random_numbers`
        if hasattr(one, "layer_scale"):
            one.layer_scale.data.fill_(0.3)
    return net, [torch.randn(2, 3, size, size - 8, dtype=torch.float64)]


MODELS = ["resnet18", "mobilenet_v3_small", "efficientnet_b0", "convnext_tiny"]


@needs_torchvision
@pytest.mark.parametrize(
    ("name", "grid"), [(name, (2, 1)) for name in MODELS] + [(MODELS[1], (2, 2))]
)
def test_models_of_torchvision(name: str, grid: Any) -> None:
    net, inputs = of_torchvision(name, 48)
    on_threads(
        grid[0] * grid[1],
        model_equals_one_process,
        lambda: (copy.deepcopy(net), inputs),
        (),
        grid,
        (2, 3),
    )


UNETS: list[Any] = [
    (2, 13, {}, (2, 2)),
    (2, 16, {"up": "bilinear", "norm": "group"}, (4, 1)),
    (2, 12, {"up": "nearest", "norm": "instance", "attention": 2}, (1, 3)),
    (3, 7, {"up": "transpose"}, (2, 2, 1)),
    (3, 8, {"up": "trilinear", "norm": "group", "attention": 1}, (2, 1, 2)),
]


@pytest.mark.parametrize(("ndim", "size", "options", "grid"), UNETS)
def test_unets(ndim: int, size: int, options: Any, grid: Any) -> None:
    net, inputs = unet(ndim, size, **options)
    on_threads(
        int(torch.tensor(grid).prod()),
        model_equals_one_process,
        lambda: (copy.deepcopy(net), inputs),
        (),
        grid,
        range(2, 2 + ndim),
    )


@needs_mpi
def test_unet_on_ranks() -> None:
    on_ranks(4, unet_equals_one_process, (2, 13), (2, 2), (2, 3))


@pytest.mark.parametrize("sharded", [False, True])
def test_batch_over_another_axis(sharded: bool) -> None:
    on_threads(4, beside_data_parallel, sharded)


@pytest.mark.parametrize(("axes", "over"), [(["x", "y"], "x"), (["x"], "x"), (["y"], "y")])
def test_shards_over_the_workers_that_cut_space(axes: list[str], over: str) -> None:
    on_threads(4, beside_its_shards, axes, over)


def test_blocks_and_losses() -> None:
    on_threads(4, takes_blocks)


def test_random_numbers() -> None:
    """Masks are the same on any grid."""
    found = []
    for grid in ((1, 1), (2, 1), (2, 2), (1, 3)):
        torch.manual_seed(7)
        workers = grid[0] * grid[1]
        found.append(linop.launch(lambda b, g=grid: noisy(b, g), workers))
    for results in found:
        for result in results:
            assert difference(result, found[0][0]) <= TOLERANCE
    assert (found[0][0] == found[0][0].flatten()[0]).sum() < 100


@needs_mpi
def test_random_numbers_on_ranks() -> None:
    on_ranks(2, noisy_on_ranks)


# Errors


class Net(nn.Module):
    """A convolution, and a function of its result."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3, padding=1)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        y = self.conv(x)
        return self.function(y)


def refusals(function: Any) -> list[str]:
    """The error that all workers raise."""

    def main(backend: Any) -> str:
        torch.manual_seed(0)
        net = spatial(Net(function), Mesh(backend, x=2)["x"], (2,), check=False)
        try:
            net(torch.ones(1, 1, 8, 8))
        except PartitionError as error:
            return str(error)
        return ""

    return linop.launch(main, 2)


CASES = [
    (
        lambda y: y.index_fill_(2, torch.tensor([0]), 1.0),
        "index_fill_ of a tensor that is cut changes",
    ),
    (lambda y: y[:, :, 1:].add_(1), "add_ changes a view in place, whose blocks had to be moved"),
    (lambda y: y.register_hook(print), "a hook would see this worker's gradient"),
    (lambda y: y.data_ptr(), "there is no memory that has all of it"),
    (torch.rand_like, "draw them for a whole tensor, torch.rand(x.shape)"),
]


@pytest.mark.parametrize(("function", "words"), CASES)
def test_refusals_name_module_and_line(function: Any, words: str) -> None:
    for said in refusals(function):
        assert words in said
        assert "module (Net), test_spatial_models.py:" in said


def test_gathered_functions_are_said() -> None:
    with pytest.warns(GatheredWarning, match=r"module \(Net\), test_spatial_models.py:\d+: fft"):
        assert refusals(torch.fft.fft2) == ["", ""]


def test_control_flow_that_depends_on_data() -> None:
    """Numbers are those of the whole tensor, the same on all workers."""

    def main(backend: Any) -> bool:
        net = spatial(
            Net(lambda y: y * 2 if y.mean() > 100 or float(y[0, 0, 0, 0]) > 100 else -y),
            Mesh(backend, x=2)["x"],
            (2,),
            check=False,
        )
        return isinstance(net(torch.ones(1, 1, 8, 8)), CutTensor)

    assert linop.launch(main, 2) == [True, True]


def test_workers_that_pass_different_inputs() -> None:
    def main(backend: Any) -> str:
        with linop.layers.seeded(0):
            net = spatial(nn.Conv2d(1, 1, 3), Mesh(backend, x=2)["x"], (2,))
        try:
            net(torch.ones(1, 1, 8, 8 + backend.worker))
        except BackendError as error:
            return str(error)
        return ""

    for said in linop.launch(main, 2):
        assert "worker 1 calls it with a tensor of shape (1, 1, 8, 9)" in said


def test_blocks_that_make_up_no_image() -> None:
    def main(backend: Any) -> str:
        with linop.layers.seeded(0):
            net = spatial(nn.Conv2d(1, 1, 3), Mesh(backend, x=2)["x"], (2,))
        try:
            net.cut(torch.ones(1, 1, 3 + backend.worker, 8))
        except ShapeError as error:
            return str(error)
        return ""

    for said in linop.launch(main, 2):
        assert "worker 0 has a block of shape (1, 1, 3, 8)" in said
        assert "(1, 1, 4, 8)" in said


def test_arguments() -> None:
    def main(backend: Any) -> list[str]:
        said = []
        for net, dims in ((3, (2,)), (nn.ReLU(), (2, 3)), (nn.ReLU(), (2.5,))):
            try:
                spatial(net, Mesh(backend, x=2)["x"], dims)  # type: ignore[arg-type]
            except ArgumentError as error:
                said.append(str(error))
        return said

    for said in linop.launch(main, 2):
        assert len(said) == 3
        assert "a dimension for each axis expected" in said[1]


class Squared(torch.autograd.Function):
    """With a backward of its own, which gets no cut tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 2 * ctx.saved_tensors[0]  # type: ignore[no-any-return]


def test_functions_with_a_backward_of_their_own_are_refused() -> None:
    for said in refusals(Squared.apply):
        assert "mul of a tensor that is cut, inside of a torch.autograd.Function" in said


def test_random_numbers_in_checkpoints_are_refused() -> None:
    def checkpointed(y: Tensor) -> Any:
        draws = nn.Dropout(0.5) if y.ndim == 4 else None
        return torch.utils.checkpoint.checkpoint(draws, y, use_reentrant=False)

    for said in refusals(checkpointed):
        assert "random numbers in torch.utils.checkpoint" in said


def test_second_derivatives() -> None:
    net = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 2, 3, 2)).double()
    x = torch.randn(2, 1, 12, 8, dtype=torch.float64)
    expected = _penalty(copy.deepcopy(net), x)

    def main(backend: Any) -> list[Tensor]:
        with strips_from(backend, 0):
            mine = spatial(copy.deepcopy(net), Mesh(backend, x=2)["x"], (2,))
            return _penalty(mine, x)

    for found in linop.launch(main, 2):
        for a, b in zip(found, expected, strict=True):
            assert difference(a, b, float(expected[0].abs().max())) <= TOLERANCE


def _penalty(net: Any, x: Tensor) -> list[Tensor]:
    """Gradients of the norm of a gradient."""
    x = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
    g.square().sum().backward()
    return [p.grad for p in net.parameters() if p.grad is not None]


def _compiled_around(net: Any, axis: Any) -> Any:
    return torch.compile(spatial(net, axis, (2,)), backend="eager")


def _compiled_inside(net: Any, axis: Any) -> Any:
    return spatial(torch.compile(net, backend="eager"), axis, (2,))  # type: ignore[arg-type]


def _compiled_part(net: Any, axis: Any) -> Any:
    net[0].compile(backend="eager")
    return spatial(net, axis, (2,))


@pytest.mark.parametrize("make", [_compiled_around, _compiled_inside, _compiled_part])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_compiled_models_run_as_they_are(make: Any) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.Conv2d(2, 2, 3)).double()
    x = torch.randn(1, 1, 8, 8, dtype=torch.float64)
    expected = copy.deepcopy(net)
    expected(x).square().mean().backward()

    def main(backend: Any) -> list[Tensor | None]:
        mine = make(copy.deepcopy(net), Mesh(backend, x=2)["x"])
        mine(x).square().mean().backward()
        return [p.grad for p in mine.parameters()]

    for found in linop.launch(main, 2):
        for a, p in zip(found, expected.parameters(), strict=True):
            assert a is not None and p.grad is not None
            assert difference(a, p.grad) <= TOLERANCE


COMPLEX: list[Any] = [
    lambda y: y.std((2, 3)),
    lambda y: y.var(2),
    lambda y: (y.mH @ y).abs(),
    lambda y: torch.view_as_complex(torch.view_as_real(y) * 2).conj().angle(),
    lambda y: torch.complex(y.real, y.imag + 1).abs().sum((2, 3)),
    lambda y: torch.linalg.vector_norm(torch.nn.functional.pad(y, (1, 2, 3, 1)).roll(2, 2), dim=2),
]


class Complex(nn.Module):
    """A complex convolution, and a real function of its result."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3, padding=1, dtype=torch.complex128)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.conv(torch.complex(x, x.roll(1, 3))))


@pytest.mark.parametrize("function", COMPLEX)
@pytest.mark.filterwarnings("error::linop.strategies.space.dispatch.GatheredWarning")
def test_complex_tensors(function: Any) -> None:
    torch.manual_seed(0)
    net, x = Complex(function), torch.randn(2, 1, 7, 6, dtype=torch.float64)
    # Gradients of complex parameters are compared as those of their parts.
    on_threads(4, _parts_equal_one_process, net, x)


def _parts_equal_one_process(backend: Any, net: nn.Module, x: Tensor) -> None:
    found = []
    for cut in (False, True):
        mine: Any = copy.deepcopy(net)
        mine = spatial(mine, Mesh(backend, x=2, y=2)["x", "y"]) if cut else mine
        given = x.clone().requires_grad_()
        y = mine(given)
        (y * torch.arange(y.numel(), dtype=y.dtype).reshape(tuple(y.shape)).cos()).sum().backward()
        grads = [torch.view_as_real(p.grad) for p in mine.parameters()]
        found.append([y.whole() if isinstance(y, CutTensor) else y, given.grad, *grads])
    for a, b in zip(found[1], found[0], strict=True):
        assert difference(a, b, 0.1) <= TOLERANCE
