"""Mixtures of experts over workers beside one process that goes from token to token: contracts.
Needs torch.

Ranks import this module, and no test.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

import linop
from linop import Partition, TensorSpace
from linop.backends import Backend
from support.contracts.plans import mine
from support.layers.cases import WIDE, block, normal, same

Tensor = Any


@dataclass(frozen=True)
class Mixture:
    """A call of `linop.layers.MixtureOfExperts`.

    Args:
        lengths: of the blocks of the first dimension.
        more: length of another dimension of tokens.
        features, hidden: of a token, of an expert.
        experts, k, factor: how many there are, experts of a token, `capacity_factor`.
        one: this expert is everybody's first choice; None: tokens go anywhere.
        outside: workers that have no tokens and no experts.
    """

    lengths: tuple[int, ...]
    more: int = 1
    features: int = 3
    hidden: int = 2
    experts: int = 4
    k: int = 2
    factor: float | None = None
    normalize: bool = True
    one: int | None = None
    outside: int = 0
    seed: int = 0

    @property
    def workers(self) -> int:
        return len(self.lengths) + self.outside

    def parameters(self) -> dict[str, Tensor]:
        """Whole parameters, by name."""
        E, d, h = self.experts, self.features, self.hidden
        router = normal((E, d), self.seed)
        if self.one is not None:
            router[self.one % E, 0] += 50  # the first feature of tokens is one
        up, down = normal((E, 2 * h, d), self.seed + 1), normal((E, d, h), self.seed + 2)
        return {"router": router, "gate_up_proj": up, "down_proj": down}

    def tokens(self) -> Tensor:
        x = normal((sum(self.lengths), self.more, self.features), self.seed + 3)
        x[..., 0] = 1
        return x


@st.composite
def mixtures(draw: Any, most: int, longest: int = 60) -> Mixture:
    """Mixtures on up to so many workers, with all in all up to so many tokens."""
    workers = draw(st.integers(1, most))
    outside = draw(st.sampled_from([0, 0, 0, 1])) if workers < most else 0
    parts = st.integers(0, longest // workers)
    experts = draw(st.integers(1, 8))
    return Mixture(
        tuple(draw(parts) for _ in range(workers)),
        draw(st.integers(1, 2)) if longest > 20 else 1,
        experts=experts,
        k=draw(st.integers(1, min(3, experts))),
        factor=draw(st.sampled_from([None, None, 0.0, 0.5, 1.0, 3.0])),
        normalize=draw(st.booleans()),
        one=draw(st.none() | st.integers(0, 7)),
        outside=outside,
        seed=draw(st.integers(0, 99)),
    )


def one_by_one(case: Mixture, x: Tensor, given: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The result and the losses, token after token."""
    rows = x.reshape(-1, case.features)
    logits = rows @ given["router"].T
    probabilities = logits.softmax(-1)
    n, results = len(rows), [torch.zeros_like(row) for row in rows]
    chosen = [p.topk(case.k).indices.tolist() for p in probabilities.detach()]
    room = [math.inf if case.factor is None else math.ceil(case.factor * case.k * n / case.experts)]
    left, times = room * case.experts, [0] * case.experts
    for choice in range(case.k):
        for token, row in enumerate(rows):
            e = chosen[token][choice]
            times[e] += 1
            left[e] -= 1
            if left[e] < 0:
                continue
            gate = probabilities[token, e]
            if case.normalize:
                gate = gate / probabilities[token, chosen[token]].sum()
            a, b = (given["gate_up_proj"][e] @ row).chunk(2)
            hidden = torch.nn.functional.silu(a) * b
            results[token] = results[token] + gate * (given["down_proj"][e] @ hidden)
    fractions, every = torch.tensor(times, dtype=WIDE) / max(1, n), max(1, n)
    balance = case.experts * (fractions * probabilities.sum(0) / every).sum()
    z = logits.logsumexp(-1).square().sum() / every
    y = torch.stack(results).view(x.shape) if n else x * rows.sum() * given["down_proj"].sum()
    return y, balance, z


def is_one_process(backend: Backend, case: Mixture) -> None:
    """Results, losses, and gradients of tokens, router and experts, are those of one process; at a
    second call, too, of other tokens."""
    P = Partition((len(case.lengths),))
    net = linop.layers.MixtureOfExperts(
        P,
        case.features,
        case.hidden,
        case.experts,
        case.k,
        case.factor,
        case.normalize,
        dtype=WIDE,
    )
    given = case.parameters()
    me = mine(backend)
    for name, whole in given.items():
        if (p := getattr(net, name)) is not None:
            p.data.copy_(whole[net.spaces[name].slices(me)])
        whole.requires_grad_()
    X = TensorSpace(case.tokens().shape, P, sizes={0: case.lengths})
    for turn in (1, -1):
        whole = (case.tokens() * torch.tensor([1, turn, turn])).requires_grad_()
        y, *losses = one_by_one(case, whole, given)
        upstream = normal(tuple(y.shape), case.seed + 4)
        leaves = [whole, *given.values()]
        total = (y * upstream).sum() + 0.3 * losses[0] + 0.2 * losses[1]
        wanted = torch.autograd.grad(total, leaves, materialize_grads=True)
        x = block(X, whole.detach(), backend, gradient=True)
        net.zero_grad()
        found, mine_of = net(x, losses=True)
        own = 0.3 * mine_of.balance + 0.2 * mine_of.z
        if me in P:
            same(found, y[X.slices(me)])
            own = own + (found * upstream[X.slices(me)]).sum()
        else:
            own = own + found.sum()
        own.backward()
        if me in P:
            same(x.grad, wanted[0][X.slices(me)])
        for (name, space), gradient in zip(net.spaces.items(), wanted[1:], strict=True):
            if (p := getattr(net, name)) is not None:
                same(p.grad, gradient[space.slices(me)])
        every = linop.layers.AllReduce(Partition((case.workers,)))
        sums = every(torch.stack([*mine_of]).detach())
        same(sums, torch.stack(losses))


def derives_again(backend: Backend, case: Mixture) -> None:
    """Gradients of gradients are those of one process."""
    P = Partition((len(case.lengths),))
    net = linop.layers.MixtureOfExperts(
        P, case.features, case.hidden, case.experts, case.k, dtype=WIDE
    )
    given, me = case.parameters(), mine(backend)
    for name, whole in given.items():
        if (p := getattr(net, name)) is not None:
            p.data.copy_(whole[net.spaces[name].slices(me)])
    whole = case.tokens().requires_grad_()
    upstream, other = (normal(tuple(whole.shape), case.seed + k) for k in (4, 5))

    def again(y: Tensor, x: Tensor, upstream: Tensor, other: Tensor) -> Tensor:
        (found,) = torch.autograd.grad(y, x, upstream, create_graph=True)
        return torch.autograd.grad((found * other).sum(), x)[0]

    wanted = again(one_by_one(case, whole, given)[0], whole, upstream, other)
    X = TensorSpace(whole.shape, P, sizes={0: case.lengths})
    here = X.slices(me)
    x = whole.detach()[here].clone().requires_grad_()
    same(again(net(x), x, upstream[here], other[here]), wanted[here], 1e-11)
