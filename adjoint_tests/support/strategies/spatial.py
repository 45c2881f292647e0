"""A module cut in space beside one process: outputs, gradients and buffers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from linop.backends.engine.base import Backend
from linop.layers import seeded
from linop.layers.agreement.input_agreement import agreement_of
from linop.strategies import CutTensor, DataParallel, Mesh, fully_shard, spatial
from linop.strategies.space import halos
from support.models.unets import UNet
from support.strategies.spatial_networks import build

TOLERANCE = 1e-11
"""Of the largest entry, in float64."""


def whole(y: Any) -> Any:
    """A result as one process has it."""
    return y.whole() if isinstance(y, CutTensor) else y


ZERO = 1e-2
"""Of the largest entry of all gradients, or of all buffers, with which smaller ones are compared:
some are 0 but for rounding, as the gradient of a bias before a batch norm, or the mean behind."""


def difference(a: Tensor, b: Tensor, least: float = 0.0) -> float:
    """The largest difference, of the largest entry of the second, or of `least`."""
    if a.shape != b.shape:
        return float("inf")
    if not a.numel():
        return 0.0
    a, b = a.detach().double(), b.detach().double()
    finite = b.isfinite()
    if not torch.equal(a[~finite].nan_to_num(), b[~finite].nan_to_num()):
        return float("inf")
    a, b = a.where(finite, 0.0), b.where(finite, 0.0)
    scale = max(float(b.abs().max()), least, 1e-30)
    return float((a - b).abs().max()) / scale


def run(net: Any, inputs: Sequence[Tensor], draw: int) -> dict[str, Tensor]:
    """Output of a module, gradients of inputs and parameters, and buffers, all whole."""
    xs = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    result = net(*xs)
    generator = torch.Generator().manual_seed(draw)
    results = list(result) if isinstance(result, tuple | list) else [result]
    loss: Any = 0.0
    given = {}
    for k, y in enumerate(results):
        if y.is_floating_point():
            weights = torch.randn(tuple(y.shape), generator=generator, dtype=torch.float64)
            weights = weights.to(y.device)
            given[f"gradient of output {k}"] = weights
            loss = loss + (y * weights.to(y.dtype)).sum()
    loss.backward()
    found = given | {f"output {k}": whole(y) for k, y in enumerate(results)}
    found |= {f"gradient of input {k}": x.grad for k, x in enumerate(xs) if x.requires_grad}
    for name, p in net.named_parameters():
        if p.grad is not None:
            found[f"gradient of {name.removeprefix('module.')}"] = p.grad
    for name, b in net.named_buffers():
        found[f"buffer {name.removeprefix('module.')}"] = b
    return {name: x for name, x in found.items() if x is not None}


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    """The largest difference, and of what it is."""
    if found.keys() != expected.keys():
        return float("inf"), f"keys {sorted(found.keys() ^ expected.keys())}"
    kinds = {name: name.split()[0] for name in expected}
    largest: dict[str, float] = {}
    for name, x in expected.items():
        if x.is_floating_point() and x.numel():
            kind = kinds[name]
            largest[kind] = max(largest.get(kind, 0.0), float(x.detach().abs().max()))
    # Inputs are of size 1: an output far below that is 0 but for rounding, as behind the norm of a
    # constant.
    largest["output"] = max(largest.get("output", 0.0), 0.1)
    differences = [
        (difference(found[name], x, ZERO * largest.get(kinds[name], 0.0)), name)
        for name, x in expected.items()
    ]
    return max(differences, default=(0.0, ""))


def as_torch_means(net: torch.nn.Module) -> torch.nn.Module:
    """A module whose batch norms get contiguous inputs and gradients: torch 2.13 computes wrong
    gradients of others, where the two have different strides (`test_spatial_networks` shows it)."""
    for one in net.modules():
        if isinstance(one, torch.nn.modules.batchnorm._NormBase):
            one.register_forward_pre_hook(lambda m, xs: (xs[0].contiguous(),))
            one.register_forward_hook(lambda m, x, y: y.reshape(-1).reshape(y.shape))
    return net


def compared(
    backend: Backend,
    net: torch.nn.Module,
    inputs: Sequence[Tensor],
    extents: Sequence[int],
    dims: Sequence[int],
    draw: int = 0,
) -> tuple[float, str]:
    """The largest difference from one process."""
    expected = run(as_torch_means(copy.deepcopy(net)), inputs, draw)
    names = [f"axis{k}" for k in range(len(extents))]
    mesh = Mesh(backend, **dict(zip(names, extents, strict=True)))
    found = run(spatial(copy.deepcopy(net), mesh[tuple(names)], dims), inputs, draw)
    return worst(found, expected)


def equals_one_process(
    backend: Backend, description: Any, extents: Sequence[int], dims: Sequence[int], large: int
) -> None:
    """Contract: a network drawn as data, and cut, has one process's output, gradients, buffers.

    Args:
        description: of the network, as `spatial_networks.draw` gives it.
        large: elements of a block from which on halos move as strips.
    """
    net, inputs = build(description)
    with strips_from(backend, large):
        error, what = compared(backend, net, inputs, extents, dims)
    assert error <= TOLERANCE, f"{what}: {error:.2e} of the largest entry"


@contextmanager
def strips_from(backend: Backend, large: int) -> Iterator[None]:
    """Context in which halos of blocks of so many elements move as strips."""
    _meet(backend)
    halos.LARGE = large
    _meet(backend)
    try:
        yield
    finally:
        _meet(backend)
        # Workers are threads of one process: none may restore what another has set.
        halos.LARGE = _LARGE


_LARGE = halos.LARGE


def _meet(backend: Backend) -> None:
    agreement_of(backend).gather_objects(None, "meet in a test of spatial")


def model_equals_one_process(
    backend: Backend,
    make: Callable[..., tuple[torch.nn.Module, Sequence[Tensor]]],
    arguments: Sequence[Any],
    extents: Sequence[int],
    dims: Sequence[int],
) -> None:
    """Contract: a model, as it is, has one process's output, gradients and buffers.

    Args:
        make: gives the module and its inputs, the same on all workers.
        arguments: of `make`.
    """
    net, inputs = make(*arguments)
    error, what = compared(backend, net, inputs, extents, dims)
    assert error <= TOLERANCE, f"{what}: {error:.2e} of the largest entry"


def unet(ndim: int, size: int, **options: Any) -> tuple[torch.nn.Module, list[Tensor]]:
    """A U-Net in float64 and its input, of extents that differ by one from dimension to
    dimension."""
    torch.manual_seed(0)
    with seeded(0):
        net = UNet(ndim, **{"width": 4, "depth": 2, **options}).double()
    generator = torch.Generator().manual_seed(1)
    shape = (2, 1, *(size + d for d in range(ndim)))
    return net, [torch.randn(shape, generator=generator, dtype=torch.float64)]


def unet_equals_one_process(
    backend: Backend, arguments: Sequence[int], extents: Sequence[int], dims: Sequence[int]
) -> None:
    """Contract: a U-Net has one process's output, gradients and buffers."""
    model_equals_one_process(backend, unet, arguments, extents, dims)


def beside_data_parallel(backend: Backend, sharded: bool) -> None:
    """Contract: with the batch over another axis of the mesh, gradients are those of the whole
    batch in one process; parameters are copies, or shards."""
    net, (x,) = unet(2, 13, norm="group")
    expected = run(copy.deepcopy(net), [x], 0)
    mesh = Mesh(backend, dp=2, x=2)
    mine: Any = copy.deepcopy(net)
    if sharded:
        mine = spatial(fully_shard(mine, mesh["dp"]), mesh["x"], (2,))
    else:
        mine = DataParallel(spatial(mine, mesh["x"], (2,)), mesh["dp"])
    rows = slice(mesh["dp"].index, mesh["dp"].index + 1)
    y = mine(x[rows])
    (y * expected["gradient of output 0"][rows]).sum().backward()
    for name, _ in net.named_parameters():
        found = dict(mine.named_parameters())
        theirs = next(q for key, q in found.items() if key.endswith(name))
        whole_gradient = expected[f"gradient of {name}"]
        if sharded:
            here = theirs.grad.detach().as_subclass(Tensor)
            n = whole_gradient.shape[0]
            first = -(-n // 2)
            part = whole_gradient[:first] if mesh["dp"].index == 0 else whole_gradient[first:]
            assert difference(here, part, float(whole_gradient.abs().max())) <= TOLERANCE, name
        else:
            assert difference(theirs.grad, whole_gradient) <= TOLERANCE, name


def takes_blocks(backend: Backend) -> None:
    """Contract: inputs in blocks are those of the whole, and so are losses of results."""
    net, (x,) = unet(2, 11)
    target = torch.ones(2, 2, *x.shape[2:], dtype=torch.float64)
    expected = torch.nn.functional.mse_loss(copy.deepcopy(net)(x), target)
    mesh = Mesh(backend, x=2, y=2)
    mine = spatial(net, mesh["x", "y"], (2, 3))
    i, j = mesh.coordinates.values()
    block = torch.tensor_split(torch.tensor_split(x, 2, 2)[i], 2, 3)[j]
    given = mine.cut(block)
    assert given.shape == x.shape and given.block is block
    y = mine(given)
    assert isinstance(y, CutTensor) and y.shape == target.shape
    loss = torch.nn.functional.mse_loss(y, target)
    assert type(loss) is Tensor
    assert difference(loss, expected) <= TOLERANCE
    assert mine.state_dict().keys() == net.state_dict().keys()


class Noisy(torch.nn.Module):
    """Dropouts, and random numbers that the model draws itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(2, 4, 3, padding=1)
        self.whole = torch.nn.Dropout(0.3)
        self.channels = torch.nn.Dropout2d(0.5)
        self.attention = torch.nn.MultiheadAttention(4, 2, 0.4, batch_first=True)
        self.alpha = torch.nn.AlphaDropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.channels(self.whole(self.first(x)))
        tokens = x.flatten(2).transpose(1, 2)
        seen, _ = self.attention(tokens, tokens, tokens)
        x = self.alpha(x + seen.transpose(1, 2).reshape(x.shape))
        small = self.whole(torch.nn.functional.avg_pool2d(x, (2, 6)))  # whole on some grids
        x = x + self.channels(small.mean((2, 3), keepdim=True))
        kept = torch.empty(x.shape[0], 1, 1, 1, dtype=x.dtype).bernoulli_(0.5)
        return x * kept + torch.rand(4, 1, 1, dtype=x.dtype)


def noisy_on_ranks(backend: Backend) -> None:
    """Contract: workers whose generators differ draw the same."""
    torch.manual_seed(100 + (backend.worker or 0))
    found = agreement_of(backend).gather_objects(noisy(backend, (2, 1)).tolist(), "compare")
    assert found[0] == found[1]


def noisy(backend: Backend, extents: Sequence[int]) -> Tensor:
    """Output of a module that draws random numbers, whole."""
    with seeded(3):
        net = Noisy().double()
    x = torch.arange(2 * 2 * 7 * 6, dtype=torch.float64).reshape(2, 2, 7, 6).cos()
    mesh = Mesh(backend, x=extents[0], y=extents[1])
    mine = spatial(net, mesh["x", "y"], (2, 3))
    mine(x)
    return whole(mine(x)).detach()  # type: ignore[no-any-return]


def beside_its_shards(backend: Backend, axes: Sequence[str], over: str) -> None:
    """Contract: parameters sharded over workers that cut space have one process's gradients.

    Args:
        axes: of a mesh of (2, 2) workers, those that cut space.
        over: the axis that parameters are sharded over.
    """
    net, (x,) = unet(2, 13, norm="group")
    expected = run(copy.deepcopy(net), [x], 0)
    mesh = Mesh(backend, x=2, y=2)
    mine = copy.deepcopy(net)
    fully_shard(next(mine.children()), mesh[over])
    fully_shard(mine, mesh[over])
    cut = spatial(mine, mesh[tuple(axes)], (2, 3)[: len(axes)])
    for _ in range(2):
        for p in cut.parameters():
            p.grad = None
        y = cut(x)
        (y * expected["gradient of output 0"]).sum().backward()
    index = mesh[over].index
    found = dict(mine.named_parameters())
    assert len(found) == len(dict(net.named_parameters()))
    for name, shard in found.items():
        gradient = expected[f"gradient of {name}"]
        first = -(-gradient.shape[0] // 2)
        part = gradient[:first] if index == 0 else gradient[first:]
        here = shard.grad.detach().as_subclass(Tensor)
        assert difference(here, part, float(gradient.abs().max())) <= TOLERANCE, name


def unet_on_a_device(backend: Backend, arrays: Any, extents: Sequence[int]) -> None:
    """Contract: U-Nets in a device's memory have one process's output, gradients and buffers."""
    for options in ({}, {"up": "bilinear", "norm": "group", "attention": 2}):
        net, inputs = unet(2, 13, **options)
        net, inputs = net.to(arrays.device), [x.to(arrays.device) for x in inputs]
        for large in (0, 1 << 15):
            with strips_from(backend, large):
                error, what = compared(backend, net, inputs, extents, (2, 3))
            # Convolutions of devices sum in orders of their own.
            assert error <= 1e-9, f"{what}: {error:.2e} of the largest entry"
