"""The networks of examples/ as SPMD programs, on threads and on ranks: they train as their
sequential twins do. Needs torch.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch

from linop import Partition, TensorSpace
from linop.backends import Backend
from support.contracts.plans import mine
from support.examples import example
from support.layers.cases import WIDE, normal, same

TABLE_1 = {
    "C1.weight": ((6, 1, 5, 5), {0}),
    "C1.bias": ((6,), {0}),
    "C3.weight": ((16, 6, 5, 5), {0}),
    "C3.bias": ((16,), {0}),
    "C5.weight": ((60, 200), {0, 1, 2, 3}),
    "C5.bias": ((60,), {0, 2}),
    "F6.weight": ((42, 60), {0, 1, 2, 3}),
    "F6.bias": ((42,), {0, 2}),
    "Output.weight": ((5, 42), {0, 1, 2, 3}),
    "Output.bias": ((5,), {0, 2}),
}
"""Of the paper: shapes, and on which workers they are."""
_TWINS = threading.Lock()

lenet, unet = example("lenet5"), example("unet3d")


def has_table_1(backend: Backend) -> None:
    """The parameters of every worker are those of table 1."""
    found = {name: tuple(p.shape) for name, p in lenet.distributed().named_parameters()}
    wanted = {name: s for name, (s, workers) in TABLE_1.items() if mine(backend) in workers}
    assert found == wanted, (found, wanted)


def lenet_trains_as_its_twin(
    backend: Backend, data: str, batch: int, count: int, tolerance: float
) -> None:
    """The losses of the first steps agree."""
    root = mine(backend) == 0
    torch.manual_seed(5)
    model = lenet.distributed().to(WIDE)
    sets = getattr(lenet, data)()[0]
    order = lenet.batches(len(sets[1]), batch, (5, 0))[:count]
    losses = _losses(model, lenet.held(sets, root, WIDE), order)
    if root:
        torch.manual_seed(5)
        wanted = _losses(lenet.sequential().to(WIDE), lenet.held(sets, root, WIDE), order)
        worst = np.abs(np.subtract(losses, wanted)).max()
        assert len(losses) == count and worst <= tolerance, worst
        assert wanted[-1] < wanted[0]


def _losses(model: Any, data: Any, order: Any) -> list[float]:
    return list(lenet.steps(model, torch.optim.Adam(model.parameters(), lr=0.001), data, order))


def unet_trains_as_its_twin(
    backend: Backend, grid: Any, shape: Any, count: int, tolerance: float
) -> None:
    """Scores, gradients, and after some steps parameters and buffers agree."""
    P_x, worker = Partition((1, 1, *grid)), mine(backend)
    torch.manual_seed(6)
    model = unet.UNet(P_x).to(WIDE)
    with _TWINS:
        torch.manual_seed(6)
        twin = unet.UNet().to(WIDE)
    images, inside = unet.blobs(shape, 2, 7)
    here = TensorSpace(images.shape, P_x).slices(worker)
    weights = normal(tuple(images.shape), 8)
    whole, x = images.clone().requires_grad_(), images[here].requires_grad_()
    wanted, y = twin(whole), model(x)
    wanted.backward(weights)
    y.backward(weights[here])
    same(y, wanted[here], tolerance)
    same(x.grad, whole.grad[here], tolerance)
    _same_parameters(model, twin, tolerance, gradients=True)
    ours, theirs = unet.optimizer_of(model), unet.optimizer_of(twin)
    for _ in range(count):
        y, _ = unet.step(model, ours, images[here], inside[here], images.numel())
        wanted, _ = unet.step(twin, theirs, images, inside, images.numel())
    same(y, wanted[here], tolerance)
    _same_parameters(model, twin, tolerance)
    with torch.no_grad():
        same(model.eval()(images[here]), twin.eval()(images)[here], tolerance)


def _same_parameters(model: Any, twin: Any, tolerance: float, gradients: bool = False) -> None:
    """And buffers."""
    wholes = dict(twin.named_parameters())
    if not gradients:
        wholes |= dict(twin.named_buffers())
    for path, layer in model.named_modules():
        for name, space in getattr(layer, "spaces", {}).items():
            part, whole = getattr(layer, name), wholes.get(f"{path}.{name}")
            if part is not None and whole is not None:
                part, whole = (part.grad, whole.grad) if gradients else (part, whole)
                same(part, whole[space.slices(layer.worker)], tolerance)
