"""Resampling by factors that are no whole numbers, whose results torch's own gradients may not
be of."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import linop
from linop import Partition, layers
from linop.strategies import Mesh, spatial

# Factors that give a whole multiple of the extent, or leave it; small and large images.
SETTINGS = [
    ((4, 4), 2.2),
    ((8, 8), 1.1),
    ((8, 9), (1.1, 2.3)),
    ((9, 8), (0.51, 2.3)),
    ((37, 29), (2.3, 2.3)),
    ((37, 29), (2.0, 2.3)),
]


class Resized(nn.Module):
    def __init__(self, factor: Any, mode: str) -> None:
        super().__init__()
        self.factor, self.mode = factor, mode

    def forward(self, x: Tensor) -> Tensor:
        return F.interpolate(x, scale_factor=self.factor, mode=self.mode)


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bicubic"])
@pytest.mark.parametrize(("size", "factor"), SETTINGS)
def test_factors(size: Any, factor: Any, mode: str) -> None:
    """Results are torch's; gradients are those of the results, which are linear."""
    net, x = Resized(factor, mode), torch.randn(2, 3, *size, dtype=torch.float64)
    expected, other = net(x), torch.randn_like(x)
    g = torch.randn_like(expected)

    def main(backend: Any) -> Any:
        mine = spatial(net, Mesh(backend, x=2)["x"], dims=(2,))
        leaf = x.clone().requires_grad_()
        y = mine(leaf)
        (gradient,) = torch.autograd.grad((y * g).sum(), leaf)
        return y.whole().detach(), gradient

    for y, gradient in linop.launch(main, 2):
        torch.testing.assert_close(y, expected)
        torch.testing.assert_close((gradient * other).sum(), (net(other) * g).sum())


@pytest.mark.parametrize(
    ("size", "factor", "mode"),
    [((8, 8), 1.1, "bicubic"), ((37, 29), 2.3, "nearest")],
)
def test_torch_computes_gradients_of_other_results(size: Any, factor: Any, mode: str) -> None:
    """The reason that gradients are not compared with torch's; where it fails, torch is mended."""
    net, x = Resized(factor, mode), torch.randn(1, 3, *size, dtype=torch.float64)
    leaf = x.clone().requires_grad_()
    g = torch.randn_like(net(x))
    (gradient,) = torch.autograd.grad((net(leaf) * g).sum(), leaf)
    assert abs((gradient * x).sum() - (net(x) * g).sum()) > 1e-3


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear"])
def test_the_layer_has_the_same_results(mode: str) -> None:
    x = torch.randn(1, 2, 37, 29, dtype=torch.float64)
    expected = Resized(2.3, mode)(x)

    def main(backend: Any) -> Any:
        layer = layers.Upsample(Partition((1, 1, 2, 1)), scale_factor=2.3, mode=mode)
        return layer(x.tensor_split(2, 2)[backend.worker])

    torch.testing.assert_close(torch.cat(linop.launch(main, 2), 2), expected)
