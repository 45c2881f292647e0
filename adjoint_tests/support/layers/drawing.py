"""Parameters that are drawn in blocks, as SPMD programs. Needs torch.

Ranks import this module, and no test.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from linop import Partition, layers
from linop.backends import Backend

EVERY = Partition((2, 1, 2, 1)), Partition((2, 2)), Partition((4,))


class Largest(TorchDispatchMode):
    """Mode that records the size of the largest tensor in memory that a function returns."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and not made.is_meta:
            self.nbytes = max(self.nbytes, made.nbytes)
        return made


def pairs() -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """Layers that draw, and their twins, by name."""
    image, grid, line = EVERY
    nn, bf16 = torch.nn, torch.bfloat16
    return {
        "linear": (
            lambda: layers.Linear(grid, 70, 900, P_W=Partition((1, 4))),
            lambda: nn.Linear(70, 900),
        ),
        "half": (
            lambda: layers.Linear(grid, 33, 900, P_W=grid, dtype=bf16),
            lambda: nn.Linear(33, 900, dtype=bf16),
        ),
        "convolution": (
            lambda: layers.Conv2d(image, 9, 300, 5, P_W=Partition((2, 2, 1, 1))),
            lambda: nn.Conv2d(9, 300, 5),
        ),
        "embedding": (
            lambda: layers.Embedding(line, 900, 77, P_y=grid, P_W=grid, padding_idx=801),
            lambda: nn.Embedding(900, 77, padding_idx=801),
        ),
    }


def reset(backend: Backend) -> None:
    """`reset_parameters` gives the values of the sequential layers, and draws as much; in another
    dtype too."""
    for name, (make, make_twin) in pairs().items():
        layer, twin = make(), make_twin()
        for dtype in (torch.float32, torch.float64):
            layer, twin = layer.to(dtype), twin.to(dtype)
            before = dict(layer.named_parameters())
            with layers.seeded(7):
                layer.reset_parameters()
                after = torch.rand(1)
            with layers.seeded(7):
                twin.reset_parameters()
                assert torch.equal(after, torch.rand(1)), name
            equal(layer, twin)
            assert all(p is before[n] for n, p in layer.named_parameters())
    norm = layers.BatchNorm2d(EVERY[0], 6)
    for x in (*norm.parameters(), *norm.buffers()):
        x.data.fill_(9)
    norm.reset_parameters()
    equal(norm, torch.nn.BatchNorm2d(6))
    layers.MSELoss(EVERY[2]).reset_parameters()  # has none


def made_on_meta(backend: Backend) -> None:
    """Layers that are made on the meta device draw nothing, and get memory when they are reset,
    or from a state."""
    for name, (make, make_twin) in pairs().items():
        with layers.seeded(3), torch.device("meta"):
            layer = make()
        assert all(p.is_meta for p in layer.parameters()), name
        before = dict(layer.named_parameters())
        with layers.seeded(3):
            layer.reset_parameters()
        with layers.seeded(3):
            twin = make_twin()
        equal(layer, twin)
        assert all(p is before[n] and p.requires_grad for n, p in layer.named_parameters())
    with torch.device("meta"):
        norm = layers.BatchNorm1d(Partition((4,)), 5)
        again = layers.BatchNorm1d(Partition((4,)), 5)
    norm.reset_parameters()
    equal(norm, torch.nn.BatchNorm1d(5))
    plain = torch.nn.BatchNorm1d(5)
    plain.running_mean.fill_(3)
    mine = backend.worker or 0
    with_all = {n: x for n, x in plain.state_dict().items() if again.spaces[n].partition}
    if mine == 0:  # others have no weight, and torch's load_state_dict refuses
        again.load_state_dict(with_all)
        equal(again, plain)


def equal(layer: Any, twin: Any) -> None:
    """Every worker's blocks have the bits of the twin's."""
    wholes = dict([*twin.named_parameters(), *twin.named_buffers()])
    for name, block in [*layer.named_parameters(), *layer.named_buffers()]:
        whole = wholes[name][layer.spaces[name].slices(layer.worker)]
        assert torch.equal(block, whole), name


def no_worker_makes_the_whole(backend: Backend) -> None:
    """Nobody has more memory than a block, and a piece."""
    grid = Partition((2, 2))
    for make in (
        lambda: layers.Linear(grid, 1000, 2000, P_W=grid),
        lambda: layers.Conv2d(Partition((1, 4, 1, 1)), 400, 500, 3),
        lambda: layers.Embedding(Partition((4,)), 2000, 1000, P_y=grid, P_W=grid),
        lambda: layers.SpectralConv(Partition((1, 1, 4, 1)), 20, 20, [40, 50]),
    ):
        with Largest() as seen:
            layer = make()
        space = layer.spaces["weight"]
        size = 8 if isinstance(layer, layers.SpectralConv) else 4
        block = size * max(prod(r.shape) for r in space.regions)
        whole = size * prod(space.global_shape)
        assert seen.nbytes <= block + (1 << 10) < whole / 3, (layer, seen.nbytes, block, whole)
        with Largest() as seen:
            layer.reset_parameters()
            layers.initialize(layer, "weight", torch.nn.init.normal_)
        assert seen.nbytes <= block + (1 << 10)


def all_of_them(backend: Backend) -> None:
    for contract in CONTRACTS:
        contract(backend)


CONTRACTS = (reset, made_on_meta, no_worker_makes_the_whole)
