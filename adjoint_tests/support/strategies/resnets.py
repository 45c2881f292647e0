"""examples/resnet18.py beside its sequential twin: contracts for threads and ranks."""

from __future__ import annotations

from typing import Any

import torch

from linop import Partition, TensorSpace, layers
from linop.backends.engine.base import Backend
from linop.strategies import Mesh
from support.examples import example
from support.strategies.tensor.tensor_networks import equal

resnet = example("resnet18")
TOLERANCE = 1e-11
"""Relative to the largest gradient of a parameter."""


def is_its_twin(
    backend: Backend, grid: tuple[int, int, int], replicas: bool, size: int, batch: int = 4
) -> None:
    """Losses and gradients, of all parameters and of the images, are the twin's; and running means
    of a net whose batch norms are of the global batch."""
    torch.set_num_threads(1)
    dp, rows, columns = grid
    mesh = Mesh(backend, dp=dp, rows=rows, columns=columns)
    with layers.seeded(3):
        net = resnet.on_mesh(mesh, replicas, torch.float64, width=2, classes=3, size=size)
    with layers.seeded(3):
        twin = resnet.ResNet18(width=2, classes=3, size=size).double()
    draw = torch.Generator().manual_seed(0)
    images = torch.randn(batch, 1, size, size, generator=draw, dtype=torch.float64)
    labels = torch.randint(3, (batch,), generator=draw)
    whole, mine = (images.clone().requires_grad_() for _ in range(2))
    loss = resnet.step(net, mine, labels, mesh)
    parts = TensorSpace((batch,), Partition((dp,)))
    wanted = []
    for k in range(dp) if replicas else [...]:
        at = parts.slices(k) if replicas else ...
        wanted.append(resnet.loss_of(twin(whole[at]), labels[at], batch))
        wanted[-1].backward()
    where = TensorSpace(images.shape, Partition((dp, 1, rows, columns))).slices(backend.worker or 0)
    equal("images", mine.grad[where], whole.grad[where], TOLERANCE)
    coordinates = mesh.coordinates
    if coordinates["rows"] == coordinates["columns"] == 0 and (replicas or not coordinates["dp"]):
        equal("loss", loss, wanted[coordinates["dp"]].detach(), TOLERANCE)
    assert len(_compared(net, twin, replicas)) == _parameters(net, mesh, replicas)


def _compared(net: Any, twin: Any, replicas: bool) -> list[str]:
    """Names of this worker's parameters, whose gradients were found to be the twin's."""
    wholes, buffers = dict(twin.named_parameters()), dict(twin.named_buffers())
    seen = []
    for path, layer in net.named_modules():
        for name, space in getattr(layer, "spaces", {}).items():
            found, full = getattr(layer, name), f"{path}.{name}".removeprefix("module.")
            if found is None:
                continue
            if full in wholes:
                block = wholes[full].grad[space.slices(layer.worker)]
                equal(full, found.grad, block, TOLERANCE)
                seen.append(full)
            elif not replicas:
                equal(full, found, buffers[full][space.slices(layer.worker)], TOLERANCE)
    return seen


def _parameters(net: Any, mesh: Any, replicas: bool) -> int:
    """How many parameters a worker should have: all of 62, or none."""
    first = not any(n for name, n in mesh.coordinates.items() if name != "dp" or not replicas)
    return 62 if first else 0
