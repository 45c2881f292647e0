"""A module of stacked experts, of which each worker has some: a `linop.layers.Layer` in its
place."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from linop.backends import use
from linop.backends.autograd.functions import add_dependency
from linop.errors import ArgumentError, ShapeError
from linop.layers.experts.exchange import Exchange, tied
from linop.layers.experts.mixture import slots_of_expert
from linop.layers.layer import Function, Layer
from linop.layers.parameters.weights import hold
from linop.spaces.decomposition import Axis as Role
from linop.spaces.tensor import TensorSpace
from linop.strategies.mesh import Axis


class ParallelExperts(Layer):
    """Stacked experts of torch, called as the module whose place it takes:
    ``experts(hidden_states, indices, gates)``, of this worker's tokens. Its parameters are those of
    this worker's experts, by the same names; the module's own forward computes with them, on the
    tokens that come from all workers. Collective among the workers of the axis.

    Args:
        axis: the axis.
        whole: the module, of all experts.
        capacity_factor: as of `linop.layers.MixtureOfExperts`.
    """

    floating = False
    checks_values = True
    sums_over_axis = True
    """Gradients are sums over the tokens of all workers of the axis; `DataParallel` over it leaves
    these parameters alone."""

    def __init__(self, axis: Axis, whole: Module, capacity_factor: float | None) -> None:
        with use(axis.backend):
            super().__init__([axis.partition] * 3, axis.partition)
        self.axis, self.capacity_factor = axis, capacity_factor
        self.num_experts = experts_of(whole)
        for name, p in whole.named_parameters():
            hold(self, name, TensorSpace(tuple(p.shape), axis.partition, axes=[0]), p)
        space = next(iter(self.spaces.values()))
        a, b = space.bounds[0][axis.index]
        inner = _emptied(whole)
        if hasattr(inner, "num_experts"):
            inner.num_experts = b - a
        # No submodule, so that names of parameters stay as they were.
        self.__dict__["inner"] = inner

    def axes(self, number: int, ndim: int) -> Sequence[Role]:
        return [0]

    def train(self, mode: bool = True) -> ParallelExperts:
        self.__dict__["inner"].train(mode)
        return super().train(mode)

    def invalid_values(self, tensors: Sequence[Tensor | None]) -> str:
        indices = tensors[1] if len(tensors) > 1 else None
        if not isinstance(indices, Tensor) or not indices.numel() or indices.is_floating_point():
            return ""
        low, high = (int(n) for n in torch.aminmax(indices))
        if 0 <= low and high < self.num_experts:
            return ""
        return f"indices from {low} to {high}; there are {self.num_experts} experts"

    def bind(self, *inputs: TensorSpace) -> Function:
        X, indices, gates = inputs
        if indices.ndim != 2 or indices.global_shape != gates.global_shape:
            raise ShapeError(
                f"ParallelExperts: indices and gates of shapes {indices.global_shape} and "
                f"{gates.global_shape}; twice (tokens, experts of each) expected"
            )
        if X.ndim < 2 or math.prod(X.global_shape[:-1]) != indices.global_shape[0]:
            raise ShapeError(
                f"ParallelExperts: hidden states of shape {X.global_shape} for experts of "
                f"{indices.global_shape[0]} tokens; (…, features) of as many tokens expected"
            )
        (tokens, k), features = indices.global_shape, X.global_shape[-1]
        capacity = slots_of_expert(self.capacity_factor, k, tokens, self.num_experts)
        sizes = k, self.num_experts, capacity
        exchange = Exchange(self, self.axis.partition, features, X.dtype, *sizes, self._compute)

        def experts(x: Tensor, indices: Tensor, gates: Tensor) -> Tensor:
            own = self._parameters.values()
            y, _ = exchange(x.reshape(-1, features), indices, gates, *own)  # type: ignore[arg-type]
            return y.view(x.shape)

        return experts

    def _compute(self, rows: Tensor, counts: list[int], *parameters: Any) -> Tensor:
        if not len(rows):
            return tied(torch.zeros_like(rows), rows, *parameters)
        inner = self.__dict__["inner"]
        inner._parameters.update(zip(self._parameters, parameters, strict=True))
        own = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)).to(rows.device)
        try:
            y: Tensor = inner(rows, own.unsqueeze(1), rows.new_ones(len(rows), 1))
        finally:
            inner._parameters.update(dict.fromkeys(inner._parameters))
        return y if y.requires_grad or not torch.is_grad_enabled() else add_dependency(y, rows)

    def extra_repr(self) -> str:
        inner = type(self.__dict__["inner"]).__name__
        return (
            f"{inner}, {self.num_experts} over {self.axis.name} of {self.axis.size}, "
            f"capacity_factor={self.capacity_factor}"
        )


def experts_of(module: Module) -> int:
    """The number of experts of a module of stacked ones; 0 for any other module: parameters have
    the experts first, some of them matrices of each, and forward takes tokens, indices and
    gates. One with buffers is none, since nothing says whether they are of single experts."""
    parameters = [*module.named_parameters()]
    firsts = {p.shape[0] if p.ndim else 0 for _, p in parameters}
    own = len(parameters) == sum(p is not None for p in module._parameters.values())
    if (
        not own
        or [*module.buffers()]
        or len(firsts) != 1
        or not any(p.ndim == 3 for _, p in parameters)
    ):
        return 0
    taken = [
        p
        for p in inspect.signature(module.forward).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    return firsts.pop() if len(taken) == 3 else 0


def multiplies_by_gates(module: Any) -> bool:
    """False for experts whose result is not what they make of a token, times its gate, as of those
    that weigh their input. It is asked of one token with two gates; True where that cannot be
    computed, or gives no finite numbers, as before values are loaded."""
    parameters = [*module.parameters()]
    like = parameters[0].detach()
    widths = sorted({n for p in parameters if p.ndim == 3 for n in p.shape[1:]})
    modes = {one: one.training for one in module.modules()}
    module.eval()  # without dropout
    try:
        for width in () if like.is_meta else widths:
            x = like.new_ones(width).cumsum(0).cos()[None]
            first = torch.zeros(1, 1, dtype=torch.int64, device=like.device)
            try:
                with torch.no_grad():  # rows of one call may be rounded in several ways
                    one, half = (module(x, first, like.new_full((1, 1), g)) for g in (1.0, 0.5))
            except Exception:  # of whatever the user's module does with another width
                continue
            if not (isinstance(one, Tensor) and one.is_floating_point()):
                continue
            known = one.isfinite() & half.isfinite()
            least = torch.finfo(one.dtype)
            near = torch.isclose(one * 0.5, half, rtol=4 * least.eps, atol=least.tiny)
            return bool((near | ~known).all())
    finally:
        for inner, mode in modes.items():
            inner.training = mode
    return True


def _emptied(whole: Module) -> Any:
    """The module without values, to be called with others' parameters."""
    inner: Any = whole.__new__(type(whole))
    inner.__dict__.update(whole.__dict__)
    inner.__dict__["_parameters"] = dict.fromkeys(whole._parameters)
    return inner


def refuse(module: Any, name: str) -> None:
    """Raise an ArgumentError: a module is none of stacked experts."""
    kind = type(module).__name__
    raise ArgumentError(
        f"{name!r} is a {kind}; a module without buffers expected whose parameters are stacked, of "
        f"shape (experts, …), and that is called with (hidden_states, indices, gates), as "
        f"MixtralExperts of transformers"
    )
