"""Functions of a tensor that is split, between two parallel modules, beside one worker alone.
Needs torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

import linop
from linop.backends.engine.base import Backend
from linop.errors import PartitionError
from linop.layers import seeded
from linop.layers.agreement.input_agreement import agreement_of
from linop.strategies import ColwiseParallel, RowwiseParallel, parallelize_module
from support.strategies.tensor.tensor_parallel import axis_of

Tensor = Any
nn, F = torch.nn, torch.nn.functional
WIDTH, HEADS = 6, 3
SHAPES = ("features", "heads", "last", "first")


def _heads(h: Tensor) -> Tensor:
    return h.unflatten(-1, (-1, 2)).transpose(1, 2)


def _joined(h: Tensor) -> Tensor:
    return h.transpose(1, 2).flatten(2)


def seen(h: Tensor, shape: str) -> Tensor:
    """The tensor with its cut along another dimension: (2, 3, 6) cut along -1; heads (2, h, 3, 2)
    along 1; (2, 3, 2, h) along -1; (h, 2, 3, 2) along 0."""
    if shape == "features":
        return h
    heads = _heads(h)
    if shape == "last":
        return heads.movedim(1, -1)
    return heads if shape == "heads" else heads.transpose(0, 1)


def unseen(h: Tensor, shape: str) -> Tensor:
    """The inverse of `seen`."""
    if shape == "features":
        return h
    if shape == "last":
        return _joined(h.movedim(-1, 1))
    return _joined(h if shape == "heads" else h.transpose(0, 1))


ALONG: dict[str, Callable[[Tensor, int], Tensor]] = {
    "softmax": lambda h, d: h.softmax(d),
    "log_softmax": F.log_softmax,
    "normalize": lambda h, d: F.normalize(h, dim=d),
    "roll": lambda h, d: h.roll(1, d),
    "flip": lambda h, d: h.flip(d),
    "cumsum": torch.cumsum,
    "minus mean": lambda h, d: h - h.mean(d, keepdim=True),
    "minus amax": lambda h, d: h - h.amax(d, True),
    "over std": lambda h, d: h / (1 + h.std(d, keepdim=True)),
    "over norm": lambda h, d: h / (1 + torch.linalg.vector_norm(h, 2, d, True)),
    "sort": lambda h, d: h.sort(d)[0],
    "argmax": lambda h, d: h * h.argmax(d, keepdim=True),
    "topk": lambda h, d: h * h.topk(1, d)[0],
    "swapped chunks": lambda h, d: torch.cat(h.tensor_split(2, d)[::-1], d),
    "gather": lambda h, d: h.gather(d, h.argsort(d)),
    "unbind": lambda h, d: torch.stack(h.unbind(d)[::-1], d),
    "first": lambda h, d: h * h.narrow(d, 0, 1),
    "select": lambda h, d: h * h.select(d, 0).unsqueeze(d),
    "max": lambda h, d: h * h.max(d, keepdim=True).values,
    "sum": lambda h, d: h + h.sum(d).unsqueeze(d),
    "index": lambda h, d: h * h[(slice(None),) * (d % h.ndim) + (slice(0, 1),)],
    "length": lambda h, d: h / h.shape[d],
    "positions": lambda h, d: h * torch.arange(h.shape[d])[(...,) + (None,) * (-1 - d)],
    "ones": lambda h, d: h * torch.ones(h.shape[d])[(...,) + (None,) * (-1 - d)],
    "pad": lambda h, d: F.pad(h, (0, 0) * (-1 - d) + (1, -1)),
    "diff": lambda h, d: h * (1 + torch.diff(h, dim=d, prepend=h.narrow(d, 0, 1))),
    "glu": lambda h, d: F.glu(torch.cat([h, h], d), d),
    "layer_norm": lambda h, d: F.layer_norm(h, h.shape[d:]),
    "rms_norm": lambda h, d: F.rms_norm(h, h.shape[d:]),
    "index_select": lambda h, d: h * h.index_select(d, torch.tensor([0])),
    "index_copy": lambda h, d: torch.zeros_like(h).index_copy_(
        d, torch.tensor([0]), h.narrow(d, 0, 1)
    ),
    "index_add": lambda h, d: h.index_add(
        d, torch.tensor([0, 0]), h.narrow(d, 0, 1).repeat_interleave(2, d)
    ),
    "cosine": lambda h, d: h * F.cosine_similarity(h, h.sin(), dim=d).unsqueeze(d),
    "flattened": lambda h, d: h.flatten(d).sin().view_as(h),
    "reshaped": lambda h, d: h.reshape(-1, *h.shape[d:]).cos().reshape(h.shape),
    "root of length": lambda h, d: h * math.sqrt(h.shape[d]),
    "all": lambda h, d: h * h.norm(),
    "matrix": lambda h, d: h * (h.movedim(d, -1) @ h.movedim(d, -1).mT).sum(),
    "gram": lambda h, d: (h.movedim(d, -1) @ (h.movedim(d, -1).mT @ h.movedim(d, -1))).movedim(
        -1, d
    ),
    "einsum": lambda h, d: h * torch.einsum("...i,...i->...", *[h.movedim(d, -1)] * 2).unsqueeze(d),
    "masked": lambda h, d: h.masked_fill(h < 0, 0.5).clamp(max=0.9),
    "item": lambda h, d: h * h.sum().item(),
}
"""Functions along a dimension, negative, of any shape, with a result of that shape."""

NUMBERS: dict[str, Callable[[int], Any]] = {
    "remainder": lambda n: divmod(n, 4)[1],
    "quotient": lambda n: divmod(13, n)[0],
    "shift": lambda n: (n << 1) + (n >> 1) + (1 << n),
    "bits": lambda n: (n & 3) + (n | 1) + (n ^ 5) + ~n,
    "size in bits": lambda n: n.bit_length() + n.bit_count(),
    "comparison": lambda n: 2 if n > 2 else 1,
    "equality": lambda n: 2 if n == WIDTH or n != 3 else 1,
    "member": lambda n: 2 if n in (WIDTH, HEADS) else 1,
    "entry": lambda n: {WIDTH: 2, HEADS: 3}.get(n, 1),
    "truth": lambda n: 2 if n and n % 3 else 1,
    "text": lambda n: int(f"{n}") + int(str(n)) + int(f"{n:02d}"),
    "written": lambda n: len(f"{[n]} {(n,)} {n!r}" + str({1: n})),
    "rounded": lambda n: round(n / 4) + math.floor(n / 4) + math.ceil(n / 4) + math.trunc(n / 4),
    "least": lambda n: min(n, 4) + max(n, 2),
    "times": lambda n: len([0] * n),
    "float": lambda n: float(n) + n.real,
    "power": lambda n: n**2 + 2**n + abs(-n),
    "sorted": lambda n: sorted([n, 4])[0],
}
"""Numbers that programs compute of a length."""


def _of_length(number: Callable[[int], Any]) -> Callable[[Tensor, int], Tensor]:
    return lambda h, d: h * (1 + number(h.shape[d]))


ALONG |= {
    **{f"{name} of length": _of_length(number) for name, number in NUMBERS.items()},
    "number of elements": lambda h, d: h * h.shape[d:].numel() + h.nbytes + math.prod(h.size()),
    "text of a shape": lambda h, d: h * sum(map(ord, f"{h.shape} {h.size()!r}")),
    "text of a tensor": lambda h, d: h * (len(str(h)) + len(f"{h}")),
    "offset of a view": lambda h, d: h + h.narrow(d, -1, 1).storage_offset(),
    "strides": lambda h, d: h * sum(h.stride()) + h.stride(d),
    "vmap": lambda h, d: torch.vmap(torch.sin, d % h.ndim, d % h.ndim)(h),
    "gradient": lambda h, d: torch.func.grad(lambda y: (y.sum(d) ** 2).sum())(h),
    "vjp": lambda h, d: torch.func.vjp(lambda y: y.softmax(d), h)[0],
}


class Between(nn.Module):  # type: ignore[misc]  # torch is not typed here
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 4)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.function(self.up(x)))


PLAN = {"up": ColwiseParallel(heads=HEADS), "down": RowwiseParallel(heads=HEADS)}


def _net(function: Callable[[Tensor], Tensor]) -> Any:
    with seeded(0):
        return Between(function).double()


def is_right_or_refused(backend: Backend, name: str, shape: str, dim: int, example: bool) -> None:
    """The function's network is its twin to 1e-10, or refused on all workers alike with the
    function, the dimension that is split, and the cure."""

    def function(h: Tensor) -> Tensor:
        given = seen(h, shape)
        return unseen(ALONG[name](given, -1 - dim % given.ndim), shape)

    axis, x = axis_of(backend), torch.linspace(-2, 3, 24).double().view(2, 3, 4).sin()
    wanted, said = _net(function)(x), "right"
    try:
        options = {"example": x} if example else {}
        found = parallelize_module(_net(function), axis, PLAN, **options)(x)
        assert (found - wanted).abs().max() < 1e-10, name
    except PartitionError as error:
        said = str(error)
        assert "split" in said and "output_layouts=" in said, said
    kinds = agreement_of(axis.backend).gather_objects(said == "right")
    assert len(set(kinds)) == 1, kinds


def changed_attributes_are_followed(backend: Backend, name: str, place: str) -> None:
    """A network calls another function after an attribute has changed: as its twin, or refused."""

    class Chosen(Between):
        def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
            super().__init__(function)
            self.number, self.few, self.config = 0, [0], SimpleNamespace(number=0)
            self.options = {"number": 0}

        def forward(self, x: Tensor) -> Tensor:
            h = self.up(x)
            chosen = self.number, self.few[0], self.config.number, self.options["number"]
            return self.down(self.function(h) if any(chosen) else h)

    def called(net: Any, x: Tensor) -> list[Any]:
        first = net(x)
        if place == "attribute":
            net.number = 1
        elif place == "list":
            net.few[0] = 1
        elif place == "configuration":
            net.config.number = 1
        else:
            net.options["number"] = 1
        return [first, net(x)]

    def net() -> Any:
        with seeded(0):
            return Chosen(lambda h: ALONG[name](h, -1)).double()

    axis, x = axis_of(backend), torch.linspace(-2, 3, 24).double().view(2, 3, 4).sin()
    wanted = called(net(), x)
    try:
        found = called(parallelize_module(net(), axis, PLAN), x)
        assert all((y - z).abs().max() < 1e-10 for y, z in zip(found, wanted, strict=True)), name
    except PartitionError as error:
        assert "split" in str(error)


PLACES = ("attribute", "list", "configuration", "options")

INITS = (
    *("uniform_", "normal_", "trunc_normal_", "xavier_uniform_", "xavier_normal_"),
    *("kaiming_uniform_", "kaiming_normal_", "orthogonal_", "sparse_"),
)
"""Functions of torch.nn.init that draw."""


def _filled_by(name: str) -> Callable[[Tensor], Tensor]:
    """A tensor times one that torch.nn.init fills."""
    options = {"sparsity": 0.4} if name == "sparse_" else {}

    def filled(h: Tensor) -> Tensor:
        return h * (1 + getattr(nn.init, name)(torch.empty(3, 1, dtype=h.dtype), **options))

    return filled


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda h: F.dropout(h, 0.4),
    "dropout in place": lambda h: F.dropout(h * 1, 0.4, True, True),
    "dropout1d": lambda h: F.dropout1d(h.transpose(1, 2)).transpose(1, 2),
    "dropout2d": lambda h: F.dropout2d(h.unsqueeze(-1)).squeeze(-1),
    "dropout3d": lambda h: _joined(F.dropout3d(_heads(h).unsqueeze(-1)).squeeze(-1)),
    "alpha_dropout": lambda h: F.alpha_dropout(h, 0.3, True),
    "feature_alpha_dropout": lambda h: F.feature_alpha_dropout(h, 0.3, True),
    "rand_like": lambda h: h * torch.rand_like(h),
    "randn_like": lambda h: h * torch.randn_like(h),
    "bernoulli": lambda h: h * torch.bernoulli(h.detach().sigmoid()),
    "bernoulli_": lambda h: h * h.detach().new_empty(h.shape).bernoulli_(0.5),
    "uniform_": lambda h: h * torch.empty_like(h).uniform_(1, 2),
    "normal_": lambda h: h * torch.empty_like(h).normal_(1, 2),
    "rand": lambda h: h * torch.rand(h.shape, dtype=h.dtype),
    "rrelu": lambda h: F.rrelu(h, training=True),
    "gumbel_softmax": lambda h: F.gumbel_softmax(h, hard=True, dim=1) * h,
    "attention": lambda h: _joined(
        F.scaled_dot_product_attention(*[_heads(h)] * 3, dropout_p=0.3, is_causal=True)
    ),
    "whole": lambda h: h * torch.rand(3, 1, dtype=h.dtype),
    "permutation": lambda h: h[:, torch.randperm(3)],
    "number": lambda h: h * torch.rand(()).item(),
    "init of a part": lambda h: h * nn.init.uniform_(torch.empty_like(h), 1, 2),
    "init.normal_ of a part": lambda h: h * nn.init.normal_(torch.empty_like(h), std=2),
    "a new layer": lambda h: h * nn.Linear(3, 1, dtype=h.dtype).weight.T.detach(),
    **{f"init.{name}": _filled_by(name) for name in INITS},
}
"""Functions that draw."""
WAYS = ("plain", "checkpoint", "function", "context", "reentrant", "nested")


class Drawing(nn.Module):  # type: ignore[misc]
    """Draws of whole and of split tensors, in what may be computed again."""

    def __init__(self, function: Callable[[Tensor], Tensor], way: str) -> None:
        super().__init__()
        self.inside, self.drop, self.way = Between(function), nn.Dropout(0.3), way

    def _part(self, x: Tensor) -> Tensor:
        return self.drop(self.inside(x + 1))

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(x, 0.2)
        # Threads share the generator whose state torch would restore.
        again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        if self.way == "plain":
            x = self.drop(x) + self._part(self.drop(x))
        elif self.way == "nested":
            x = self.drop(x) + again(lambda y: again(self._part, self.drop(y)), x)
        else:
            if self.way == "context":
                again = partial(again, context_fn=linop.autograd.checkpoint_context)
            if self.way == "reentrant":
                again = partial(checkpoint, use_reentrant=True, preserve_rng_state=False)
            x = self.drop(x) + again(self._part, self.drop(x))
        return self.drop(x)


def drawn(name: str, way: str) -> list[Any]:
    """Outputs and gradients of one worker alone, in two calls whose backwards come later."""
    found: list[Any] = []
    linop.launch(lambda backend: found.extend(_drawn(backend, name, way)), 1, "threads")
    return found


def _drawn(backend: Backend, name: str, way: str) -> list[Any]:
    axis = axis_of(backend)
    with seeded(0):
        net = Drawing(DRAWS[name], way).double()
    net = parallelize_module(net, axis, {f"inside.{key}": style for key, style in PLAN.items()})
    x = torch.linspace(-2, 3, 24).double().view(2, 3, 4).sin().requires_grad_()
    if axis.index == 0:
        torch.manual_seed(5)
    agreement_of(axis.backend).gather_objects(None)
    results = [net(x) for _ in range(2)]
    found = [y.detach().numpy() for y in results]
    for y in reversed(results):
        x.grad = None
        y.square().sum().backward()
        found.append(x.grad.numpy().copy())
    return found


def draws_the_same(backend: Backend, name: str, way: str, wanted: list[Any]) -> None:
    """Every worker draws as one worker alone, also in what is computed again."""
    found = _drawn(backend, name, way)
    assert abs(found[0] - found[1]).max() > 1e-6  # every call draws anew
    for one, other in zip(found, wanted, strict=True):
        assert abs(one - other).max() < 1e-10, (name, way)
