"""Operations of windows, mirrors and points that `spatial` cuts, as those of
`spatial_operations`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from support.strategies.spatial_operations import Applied, Chooser, Settings, Shape


def windows(c: Chooser, s: Shape) -> Settings | None:
    d = c.int(2, len(s) - 1)
    size = c.int(1, min(3, s[d]))
    return {"dim": d, "size": size, "step": c.int(1, 3), "how": c.of(["sum", "logsumexp"])}


def _windows(s: Shape, v: Settings) -> nn.Module:
    def function(x: Tensor) -> Tensor:
        y = x.unfold(v["dim"], v["size"], v["step"])
        return y.sum(-1) if v["how"] == "sum" else y.logsumexp(-1)

    return Applied(function)


def columns(c: Chooser, s: Shape) -> Settings | None:
    if len(s) != 4:
        return None
    k = [c.int(1, min(3, n)) for n in s[2:]]
    return {
        "kernel_size": k,
        "dilation": 1,
        "padding": [c.int(0, 2) for _ in k],
        "stride": [c.int(1, n + 1) for n in k],
    }


def _columns(s: Shape, v: Settings) -> nn.Module:
    """Windows, each scaled by a parameter for each of its elements, and their sums."""
    k = v["kernel_size"]
    weight = nn.Parameter(torch.empty(s[1] * k[0] * k[1], 1))
    return Applied(lambda x, w: F.fold(F.unfold(x, **v) * w, s[2:], **v), weight)


def mirror(c: Chooser, s: Shape) -> Settings | None:
    return {"dims": [d for d in range(1, len(s)) if c.of([False, True])] or [2]}


def _mirror(s: Shape, v: Settings) -> nn.Module:
    return Applied(lambda x: x.flip(v["dims"]))


def smooth(c: Chooser, s: Shape) -> Settings | None:
    if len(s) != 4:
        return None
    mode, align = c.of(["bilinear", "bicubic"]), c.of([False, True])
    # Columns of extent 1 are wrong in torch 2.13: `test_spatial_networks` shows it.
    return {"size": [c.int(1, 12), c.int(2, 12)], "mode": mode, "align_corners": align}


def _smooth(s: Shape, v: Settings) -> nn.Module:
    return Applied(lambda x: F.interpolate(x, antialias=True, **v))


def points(c: Chooser, s: Shape) -> Settings | None:
    if len(s) not in (4, 5):
        return None
    modes, pads = ["bilinear", "nearest"], ["zeros", "border", "reflection"]
    size = [c.int(1, 6) for _ in s[2:]]
    align = c.of([False, True])
    own = c.of([False, True]) and s[1] >= len(s) - 2
    return {
        "size": size,
        "own": own,
        "mode": "bilinear" if own else c.of(modes),
        "padding_mode": c.of(pads),
        "align_corners": align,
    }


def _points(s: Shape, v: Settings) -> nn.Module:
    """Images at points that are a parameter's, or their own."""
    options: Any = {k: v[k] for k in ("mode", "padding_mode", "align_corners")}
    if v["own"]:
        n = len(s) - 2
        return Applied(
            lambda x: F.grid_sample(
                x, torch.stack([x[:, k] for k in range(n)], -1).tanh(), **options
            )
        )
    where = nn.Parameter(torch.empty(s[0], *v["size"], len(s) - 2))
    return Applied(lambda x, where: F.grid_sample(x, where.tanh(), **options), where)


def distances(c: Chooser, s: Shape) -> Settings | None:
    return {"p": c.of([1.0, 2.0, 3.0]), "turned": c.of([False, True])}


def _distances(s: Shape, v: Settings) -> nn.Module:
    def function(x: Tensor) -> Tensor:
        y = x.transpose(-1, -2) if v["turned"] else x
        return torch.cdist(y, y.roll(1, -1) + 1.5, v["p"])

    return Applied(function)


WINDOWS: dict[str, tuple[Any, Any, int]] = {
    "windows": (windows, _windows, 1),
    "columns": (columns, _columns, 2),
    "mirror": (mirror, _mirror, 1),
    "smooth": (smooth, _smooth, 1),
    "points": (points, _points, 1),
    "distances": (distances, _distances, 1),
}
"""As `OPERATIONS`."""
