"""U-Nets of two and three dimensions, as one process runs them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn


class Block(nn.Sequential):
    """Two convolutions with norms."""

    def __init__(self, ndim: int, inputs: int, outputs: int, norm: str) -> None:
        conv: Any = getattr(nn, f"Conv{ndim}d")
        layers: list[nn.Module] = []
        for channels in (inputs, outputs):
            layers.append(conv(channels, outputs, 3, padding=1, bias=norm != "batch"))
            layers.append(_norm(norm, ndim, outputs))
            layers.append(nn.ReLU(inplace=True))
        super().__init__(*layers)


def _norm(name: str, ndim: int, channels: int) -> nn.Module:
    if name == "group":
        return nn.GroupNorm(2, channels)
    kind = getattr(nn, f"{'Batch' if name == 'batch' else 'Instance'}Norm{ndim}d")
    return kind(channels, affine=True)  # type: ignore[no-any-return]


class UNet(nn.Module):
    """Convolutions down and up, with skips between equal extents.

    Args:
        ndim: dimensions of space.
        width: channels of the first level.
        depth: number of levels below it.
        up: "transpose": transposed convolutions; or a mode of interpolation.
        norm: "batch", "group" or "instance".
        attention: heads of an attention over all pixels of the lowest level; 0: none.
    """

    def __init__(
        self,
        ndim: int = 2,
        channels: int = 1,
        classes: int = 2,
        width: int = 8,
        depth: int = 2,
        up: str = "transpose",
        norm: str = "batch",
        attention: int = 0,
    ) -> None:
        super().__init__()
        widths = [width * 2**k for k in range(depth + 1)]
        conv: Any = getattr(nn, f"Conv{ndim}d")
        transposed: Any = getattr(nn, f"ConvTranspose{ndim}d")
        self.up = up
        self.first = Block(ndim, channels, width, norm)
        self.pool: Any = getattr(nn, f"MaxPool{ndim}d")(2)
        self.down = nn.ModuleList(Block(ndim, a, b, norm) for a, b in pairwise(widths))
        pairs = [*pairwise(widths)][::-1]
        self.raise_ = nn.ModuleList(
            transposed(b, a, 2, 2) if up == "transpose" else conv(b, a, 1) for a, b in pairs
        )
        self.decode = nn.ModuleList(Block(ndim, 2 * a, a, norm) for a, _ in pairs)
        self.last = conv(width, classes, 1)
        self.attention = (
            nn.MultiheadAttention(widths[-1], attention, batch_first=True) if attention else None
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        skips = []
        for block in self.down:
            skips.append(x)
            x = block(self.pool(x))
        if self.attention is not None:
            tokens = x.flatten(2).transpose(1, 2)
            seen, _ = self.attention(tokens, tokens, tokens, need_weights=False)
            x = x + seen.transpose(1, 2).reshape(x.shape)
        for rise, block in zip(self.raise_, self.decode, strict=True):
            skip = skips.pop()
            if self.up == "transpose":
                x = rise(x)
                wanted = skip.shape[2:]
                if x.shape[2:] != wanted:  # of an odd extent
                    pads = [w for n, m in zip(x.shape[2:], wanted, strict=True) for w in (m - n, 0)]
                    x = nn.functional.pad(x, pads[::-1])
            else:
                corners = None if self.up == "nearest" else False
                x = nn.functional.interpolate(
                    rise(x), skip.shape[2:], mode=self.up, align_corners=corners
                )
            x = block(torch.cat([skip, x], 1))
        return self.last(x)  # type: ignore[no-any-return]
