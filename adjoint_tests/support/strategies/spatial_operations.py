"""Operations that `spatial` cuts: how their settings are drawn for an input of a shape, and how
modules are made of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Shape = tuple[int, ...]
Settings = dict[str, Any]


class Chooser(Protocol):
    """Source of settings: Hypothesis, or a generator of random numbers."""

    def int(self, least: int, most: int) -> int: ...

    def of(self, values: Sequence[Any]) -> Any: ...


class Applied(nn.Module):
    """A function of the tensor, and of parameters and modules."""

    def __init__(self, function: Callable[..., Any], *parts: Any) -> None:
        super().__init__()
        self.function = function
        self.parts = nn.ModuleList(p for p in parts if isinstance(p, nn.Module))
        self.values = nn.ParameterList(p for p in parts if isinstance(p, nn.Parameter))

    def forward(self, x: Tensor) -> Any:
        return self.function(x, *self.parts, *self.values)


def _channels(c: Chooser, n: int) -> tuple[int, int]:
    """Groups of n channels, and a number of output channels."""
    groups = c.of([g for g in range(1, n + 1) if n % g == 0])
    return groups, groups * c.int(1, max(1, 4 // groups))


def conv(c: Chooser, s: Shape) -> Settings | None:
    mode = c.of(["zeros", "zeros", "same", "valid", "circular", "reflect", "replicate"])
    size, stride, pads, dilation = [], [], [], []
    for n in s[2:]:
        k, d = c.int(1, 4), c.int(1, 2)
        p = 0 if mode == "valid" else c.int(0, 3)
        if mode == "same":
            p = (d * (k - 1) + 1) // 2
        p = min(p, n - 1) if mode == "reflect" else min(p, n) if mode == "circular" else p
        while d * (k - 1) + 1 > n + 2 * p:
            k, d = k - 1, 1
        size.append(k)
        stride.append(1 if mode == "same" else c.int(1, 3))
        pads.append(p)
        dilation.append(d)
    groups, outputs = _channels(c, s[1])
    named = mode in ("same", "valid")
    return {
        "out_channels": outputs,
        "kernel_size": tuple(size),
        "stride": tuple(stride),
        "padding": mode if named else tuple(pads),
        "dilation": tuple(dilation),
        "groups": groups,
        "bias": c.of([True, False]),
        "padding_mode": "zeros" if named else mode,
    }


def _conv(s: Shape, v: Settings) -> nn.Module:
    kind: Any = getattr(nn, f"Conv{len(s) - 2}d")
    return kind(s[1], **v)  # type: ignore[no-any-return]


def transposed(c: Chooser, s: Shape) -> Settings | None:
    rows: list[tuple[int, ...]] = []
    for n in s[2:]:
        k, step, d = c.int(1, 4), c.int(1, 3), c.int(1, 2)
        more = c.int(0, max(step, d) - 1)
        full = (n - 1) * step + d * (k - 1) + 1 + more
        rows.append((k, step, c.int(0, min(3, (full - 1) // 2)), more, d))
    size, stride, pads, more_, dilation = zip(*rows, strict=True)
    groups, outputs = _channels(c, s[1])
    return {
        "out_channels": outputs,
        "kernel_size": size,
        "stride": stride,
        "padding": pads,
        "output_padding": more_,
        "groups": groups,
        "bias": c.of([True, False]),
        "dilation": dilation,
    }


def _transposed(s: Shape, v: Settings) -> nn.Module:
    kind: Any = getattr(nn, f"ConvTranspose{len(s) - 2}d")
    return kind(s[1], **v)  # type: ignore[no-any-return]


def pool(c: Chooser, s: Shape) -> Settings | None:
    kind = c.of(["Max", "Avg", "LP"])
    ceil = c.of([False, True]) and kind != "LP"
    size, stride, pads, dilation = [], [], [], []
    for n in s[2:]:
        k, d = c.int(1, 3), c.int(1, 2) if kind == "Max" else 1
        p = c.int(0, k // 2) if kind != "LP" else 0
        while d * (k - 1) + 1 > n + 2 * p:
            k, d = k - 1, 1
            p = min(p, k // 2)
        if n < d * (k - 1) + 1:
            d = 1  # else a window may be all padding
        size.append(k)
        stride.append(c.int(1, 3))
        pads.append(p)
        dilation.append(d)
    given = {"kernel_size": tuple(size), "stride": tuple(stride), "ceil_mode": ceil}
    if kind != "LP":
        given["padding"] = tuple(pads)
    if kind == "Max":
        given["dilation"] = tuple(dilation)
    if kind == "Avg":
        given["count_include_pad"] = c.of([True, False])
        if len(s) > 3:
            given["divisor_override"] = c.of([None, None, 3])
    return {"kind": kind, "given": given}


def _pool(s: Shape, v: Settings) -> nn.Module:
    kind: Any = getattr(nn, f"{v['kind']}Pool{len(s) - 2}d")
    given = dict(v["given"])
    if len(s) == 3:
        given = {k: x[0] if isinstance(x, tuple) else x for k, x in given.items()}
    if v["kind"] == "LP":
        return nn.Sequential(Applied(lambda x: x.abs() + 0.1), kind(2, **given))
    return kind(**given)  # type: ignore[no-any-return]


def adaptive(c: Chooser, s: Shape) -> Settings | None:
    wanted = tuple(c.of([1, 1, None, c.int(1, 2 * n)]) for n in s[2:])
    return {"kind": c.of(["Avg", "Max"]), "size": wanted}


def _adaptive(s: Shape, v: Settings) -> nn.Module:
    kind: Any = getattr(nn, f"Adaptive{v['kind']}Pool{len(s) - 2}d")
    size = [n if m is None else m for n, m in zip(s[2:], v["size"], strict=True)]
    return kind(size if len(size) > 1 else size[0])  # type: ignore[no-any-return]


def norm(c: Chooser, s: Shape) -> Settings | None:
    kinds = ["batch", "evaluated", "group", "instance", "layer", "last", "rms", "response"]
    groups = c.of([g for g in range(1, s[1] + 1) if s[1] % g == 0])
    return {
        "kind": c.of(kinds),
        "groups": groups,
        "affine": c.of([True, False]),
        "track": c.of([True, False]),
        "momentum": c.of([0.1, None]),
    }


def _norm(s: Shape, v: Settings) -> nn.Module | None:
    kind, ndim, affine = v["kind"], len(s) - 2, v["affine"]
    each = prod(s[2:])
    if kind in ("batch", "evaluated"):
        if each * s[0] < 2:
            return None
        made: Any = getattr(nn, f"BatchNorm{ndim}d")(s[1], 1e-2, v["momentum"], affine, v["track"])
        return made.eval() if kind == "evaluated" and v["track"] else made
    if kind == "instance":
        if each < 2:
            return None
        make: Any = getattr(nn, f"InstanceNorm{ndim}d")
        return make(s[1], 1e-2, 0.1, affine, v["track"])  # type: ignore[no-any-return]
    if kind == "group":
        return nn.GroupNorm(v["groups"], s[1], 1e-2, affine)
    if kind == "layer":
        return nn.LayerNorm(s[1:], 1e-2, affine)
    if kind == "rms":
        return nn.RMSNorm(s[-1], 1e-2, affine)
    if kind == "response":
        return nn.LocalResponseNorm(1 + v["groups"], 0.1)
    last = nn.LayerNorm(s[1], 1e-2, affine)
    return Applied(lambda x, m: m(x.movedim(1, -1)).movedim(-1, 1), last)


def resize(c: Chooser, s: Shape) -> Settings | None:
    ndim = len(s) - 2
    smooth = {1: ["linear"], 2: ["bilinear", "bicubic"], 3: ["trilinear"]}[ndim]
    mode = c.of(["nearest", "nearest-exact", "area", *smooth, *smooth])
    v: Settings = {"mode": mode}
    if c.of([True, False]):
        v["size"] = tuple(c.int(1, 2 * n + 1) for n in s[2:])
    else:
        factors = [0.5, 0.75, 1.5, 2.0, 2.0, 3.0] if mode in smooth else [0.5, 2.0, 3.0]
        chosen = tuple(c.of(factors) for _ in s[2:])
        v["scale_factor"] = tuple(
            f if int(n * f) else 1.0 for n, f in zip(s[2:], chosen, strict=True)
        )
        v["recompute_scale_factor"] = c.of([None, True])
    if mode in smooth:
        v["align_corners"] = c.of([True, False])
    return v


def _resize(s: Shape, v: Settings) -> nn.Module:
    return Applied(lambda x: F.interpolate(x, **v))


def pad(c: Chooser, s: Shape) -> Settings | None:
    mode = c.of(["constant", "constant", "reflect", "replicate", "circular"])
    widths: list[int] = []
    for n in reversed(s[2:]):
        most = {"reflect": n - 1, "circular": n}.get(mode, 3)
        least = -((n - 1) // 2) if mode == "constant" else 0
        widths += [c.int(max(least, -2), min(most, 3)) for _ in range(2)]
    value = c.of([0.0, 1.5]) if mode == "constant" else None
    return {"pad": tuple(widths), "mode": mode, "value": value}


def _pad(s: Shape, v: Settings) -> nn.Module:
    return Applied(lambda x: F.pad(x, **v))


def shuffle(c: Chooser, s: Shape) -> Settings | None:
    if len(s) != 4:
        return None
    r = c.of([2, 3])
    kinds = ["channel"]
    if s[1] % (r * r) == 0:
        kinds.append("pixel")
    if s[2] % r == 0 and s[3] % r == 0 and s[1] * r * r <= 24:
        kinds.append("un")
    groups = c.of([g for g in range(1, s[1] + 1) if s[1] % g == 0])
    return {"kind": c.of(kinds), "r": r, "groups": groups}


def _shuffle(s: Shape, v: Settings) -> nn.Module:
    if v["kind"] == "channel":
        return nn.ChannelShuffle(v["groups"])
    return nn.PixelShuffle(v["r"]) if v["kind"] == "pixel" else nn.PixelUnshuffle(v["r"])


def pointwise(c: Chooser, s: Shape) -> Settings | None:
    names = ["ReLU", "SiLU", "GELU", "Hardswish", "PReLU", "inplace", "where", "clamp", "dropout"]
    return {"kind": c.of([*names, "parameter", "constant"]), "full": [c.of([0, 1]) for _ in s]}


def _pointwise(s: Shape, v: Settings) -> nn.Module:
    kind = v["kind"]
    shape = [n if full else 1 for n, full in zip(s, v["full"], strict=True)]
    if kind == "inplace":
        return nn.Sequential(Applied(lambda x: x * 1.5), nn.ReLU(inplace=True))
    if kind == "where":
        return Applied(lambda x: torch.where(x > 0.2, x, -x * 0.3))
    if kind == "clamp":
        return Applied(lambda x: x.clamp(-0.8, 1.2) + x / 3)
    if kind == "PReLU":
        return nn.PReLU(s[1])
    if kind == "dropout":
        return nn.Dropout(0.5).eval()
    if kind == "parameter":
        parts = [nn.Parameter(torch.randn(shape)) for _ in range(2)]
        return Applied(lambda x, a, b: torch.addcmul(b, x, a), *parts)
    if kind == "constant":
        return Applied(lambda x: x * torch.arange(prod(shape)).reshape(shape).to(x).cos() + 0.1)
    return getattr(nn, kind)()  # type: ignore[no-any-return]


def joined(c: Chooser, s: Shape) -> Settings | None:
    kinds = ["residual", "excite", "cat", "along", "stack", "chunks", "pooled", "split"]
    return {"kind": c.of(kinds), "dim": c.int(2, len(s) - 1), "k": c.int(1, 2)}


def _joined(s: Shape, v: Settings) -> nn.Module | None:
    kind, d, ndim = v["kind"], v["dim"], len(s) - 2
    convolution: Any = getattr(nn, f"Conv{ndim}d")
    space = tuple(range(2, len(s)))
    if kind == "residual":
        return Applied(lambda x, m: x + m(x), convolution(s[1], s[1], 3, padding=1))
    if kind == "excite":
        one = convolution(s[1], s[1], 1)
        return Applied(lambda x, m: x * torch.sigmoid(m(x.mean(space, keepdim=True))), one)
    if kind == "cat":
        return Applied(lambda x: torch.cat([x, x.square(), x[:, :1]], 1)) if s[1] < 4 else None
    if kind == "along":
        return Applied(lambda x: torch.cat([x, x.square().narrow(d, 0, 1)], d))
    if kind == "stack":
        return Applied(lambda x: torch.stack([x, x.sin()], v["k"]).sum(v["k"]))
    if kind == "chunks":
        return Applied(lambda x: torch.cat([*x.chunk(v["k"] + 1, d)][::-1], d))
    if kind == "split":
        return Applied(lambda x: x.split(max(1, s[d] // 2), d)[0])
    if any(n < 2 for n in s[2:]):
        return None
    pooling: Any = getattr(nn, f"AvgPool{ndim}d")(2)
    return Applied(lambda x, m: x + F.interpolate(m(x), x.shape[2:]), pooling)


def parts(c: Chooser, s: Shape) -> Settings | None:
    kinds = ["slice", "step", "select", "roll", "windows", "permute", "tokens", "expand", "repeat"]
    d = c.int(2, len(s) - 1)
    a = c.int(0, s[d] - 1)
    return {"kind": c.of(kinds), "dim": d, "a": a, "b": c.int(a + 1, s[d]), "k": c.int(1, 3)}


def _parts(s: Shape, v: Settings) -> nn.Module | None:
    kind, d, k = v["kind"], v["dim"], v["k"]
    index: list[Any] = [slice(None)] * len(s)
    if kind == "slice":
        index[d] = slice(v["a"], v["b"])
        return Applied(lambda x: x[tuple(index)] * 2)
    if kind == "step":
        index[d] = slice(v["a"], None, k)
        return Applied(lambda x: x[tuple(index)])
    if kind == "select":
        return Applied(lambda x: x + x.select(d, v["a"]).unsqueeze(d))
    if kind == "roll":
        return Applied(lambda x: x.roll((k, -1), (d, 1)))
    if kind == "windows":
        if s[d] % k:
            return None
        shape = (*s[:d], s[d] // k, k, *s[d + 1 :])
        return Applied(lambda x: x.reshape(shape).transpose(d, d + 1).reshape(x.shape))
    if kind == "permute":
        return Applied(lambda x: x.movedim(d, 1).contiguous().square().movedim(1, d))
    if kind == "tokens":
        linear = nn.Linear(s[1], s[1])
        return Applied(
            lambda x, m: m(x.flatten(2).transpose(1, 2)).transpose(1, 2).reshape(x.shape), linear
        )
    if kind == "expand":
        return Applied(lambda x: x * x.mean(d, keepdim=True).expand(x.shape))
    return Applied(lambda x: x.repeat_interleave(k, d))


def reduction(c: Chooser, s: Shape) -> Settings | None:
    kinds = ["mean", "std", "softmax", "channels", "amax", "max", "norm", "normalize", "logsumexp"]
    dims = [d for d in range(1, len(s)) if c.of([True, False])] or [2]
    return {"kind": c.of(kinds), "dims": dims}


def _reduction(s: Shape, v: Settings) -> nn.Module | None:
    kind, dims = v["kind"], tuple(v["dims"])
    if kind == "mean":
        return Applied(lambda x: x - x.mean(dims, keepdim=True))
    if kind == "std":
        if prod(s[d] for d in dims) < 3:
            return None
        return Applied(lambda x: x / (x.var(dims, keepdim=True) + 0.1).sqrt())
    if kind == "softmax":
        return Applied(lambda x: x.softmax(dims[0]) * 3)
    if kind == "channels":
        return Applied(lambda x: x * x.softmax(1))
    if kind == "amax":
        return Applied(lambda x: x + x.amax(dims, keepdim=True))
    if kind == "max":
        return Applied(lambda x: x + x.max(dims[0], keepdim=True)[0])
    if kind == "norm":
        return Applied(lambda x: x * torch.linalg.vector_norm(x + 0.3, dim=dims, keepdim=True))
    if kind == "normalize":
        return Applied(lambda x: F.normalize(x + 0.7, dim=dims[0], eps=0.1))
    return Applied(lambda x: x + x.logsumexp(dims, keepdim=True))


def product(c: Chooser, s: Shape) -> Settings | None:
    return {"kind": c.of(["einsum", "gram", "attention", "matmul", "heads"])}


def _product(s: Shape, v: Settings) -> nn.Module | None:
    letters = "ijk"[: len(s) - 2]
    if v["kind"] == "einsum":
        weight = nn.Parameter(torch.randn(s[1], 3))
        return Applied(lambda x, w: torch.einsum(f"nc{letters},cd->nd{letters}", x, w), weight)
    if v["kind"] == "gram":
        return Applied(
            lambda x: torch.einsum(
                f"nc{letters},ncd->nd{letters}",
                x,
                torch.einsum(f"nc{letters},nd{letters}->ncd", x, x) / prod(s[2:]),
            )
        )
    if prod(s[2:]) > 60:
        return None
    if v["kind"] == "heads":
        attention = nn.MultiheadAttention(s[1], 1, batch_first=True)

        def attended(x: Tensor, m: Any) -> Tensor:
            t = x.flatten(2).transpose(1, 2)
            return m(t, t, t, need_weights=False)[0].transpose(1, 2).reshape(x.shape)  # type: ignore[no-any-return]

        return Applied(attended, attention)

    def attend(x: Tensor) -> Tensor:
        t = x.flatten(2).transpose(1, 2)
        if v["kind"] == "matmul":
            y = (t @ t.transpose(1, 2)).softmax(-1) @ t
        else:
            y = F.scaled_dot_product_attention(t, t, t)
        return y.transpose(1, 2).reshape(x.shape)

    return Applied(attend)


def head(c: Chooser, s: Shape) -> Settings | None:
    return {"kind": c.of(["mean", "flatten", "adaptive", "amax", "mse", "classes"])}


def _head(s: Shape, v: Settings) -> nn.Module | None:
    kind, space = v["kind"], tuple(range(2, len(s)))
    if kind == "mean":
        return nn.Sequential(Applied(lambda x: x.mean(space)), nn.Linear(s[1], 3))
    if kind == "flatten":
        return nn.Sequential(nn.Flatten(), nn.Linear(prod(s[1:]), 2))
    if kind == "adaptive":
        make: Any = getattr(nn, f"AdaptiveAvgPool{len(s) - 2}d")
        return nn.Sequential(make(1), nn.Flatten(), nn.Linear(s[1], 2))
    if kind == "amax":
        return Applied(lambda x: x.amax(space))
    if kind == "mse":
        return Applied(lambda x: F.mse_loss(x, torch.zeros_like(x) + 0.5))
    targets = torch.arange(s[0] * prod(s[2:])).reshape(s[0], *s[2:]) % s[1]
    return Applied(lambda x: F.cross_entropy(x, targets, ignore_index=1 if s[1] > 1 else -100))


OPERATIONS: dict[str, tuple[Any, Any, int]] = {
    "conv": (conv, _conv, 6),
    "transposed": (transposed, _transposed, 4),
    "pool": (pool, _pool, 4),
    "adaptive": (adaptive, _adaptive, 2),
    "norm": (norm, _norm, 5),
    "resize": (resize, _resize, 4),
    "pad": (pad, _pad, 3),
    "shuffle": (shuffle, _shuffle, 2),
    "pointwise": (pointwise, _pointwise, 3),
    "joined": (joined, _joined, 3),
    "parts": (parts, _parts, 3),
    "reduction": (reduction, _reduction, 3),
    "product": (product, _product, 2),
    "head": (head, _head, 2),
}
"""Operations: how their settings are drawn, and built; and how often they are drawn."""
