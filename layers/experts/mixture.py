"""A mixture of experts over workers, each of which has some tokens and some experts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from linop.backends.autograd.functions import add_dependency
from linop.errors import ArgumentError, PartitionError, ShapeError
from linop.layers.experts.exchange import Exchange, tied
from linop.layers.experts.losses import RouterLosses, routed, router_losses
from linop.layers.layer import Function, Layer
from linop.layers.parameters.weights import drawn, hold
from linop.layers.zero_volume import zero_volume_result
from linop.operators.collectives import broadcast
from linop.spaces.decomposition import COPIES, Axis
from linop.spaces.partition import Partition
from linop.spaces.tensor import TensorSpace

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "relu": torch.nn.functional.relu,
}


class MixtureOfExperts(Layer):
    """Gated perceptrons, of which a router chooses some for each token: W₂ (a(W₁ x) ∘ W₃ x), as in
    Mixtral. The experts are cut over the workers, whatever dimension of x is; tokens go there and
    come back by `linop.dispatch` and its adjoint.

    Args:
        P_x: the partition of input and output, of shape (…, embed_dim); grid axis k splits
            dimension k, not the last one. Tokens are in the order of workers.
        embed_dim: features of a token.
        hidden_dim: of each expert.
        num_experts: of all workers; the first ``num_experts mod workers`` have one more.
        top_k: experts of a token.
        capacity_factor: an expert takes ``ceil(capacity_factor · top_k · tokens / num_experts)``
            tokens of all workers at most, and others are dropped, as by `linop.Routing`. None:
            nothing is dropped.
        normalize: a token's gates sum to one.
        activation: a, one of "silu", "gelu", "relu".
        device, dtype: as in torch.nn.
        x_axes: roles of the grid axes of the input.

    Attributes:
        router: weight of shape (num_experts, embed_dim), on the first worker.
        gate_up_proj: W₁ and W₃ of this worker's experts, of shape
            (experts, 2 hidden_dim, embed_dim).
        down_proj: W₂, of shape (experts, embed_dim, hidden_dim).

    Raises:
        ArgumentError: a number or the activation is invalid. PartitionError: features are cut, or a
            grid axis holds copies.

    Example:
        >>> P, x = linop.Partition((2,)), torch.tensor([[1.0, 1.0], [2.0, 0.0], [3.0, 0.0]])
        >>> def main(backend):
        ...     moe = layers.MixtureOfExperts(P, 2, 1, num_experts=4, top_k=1, activation="relu")
        ...     for name in ("gate_up_proj", "down_proj"):
        ...         layers.initialize(moe, name, torch.nn.init.ones_)
        ...     return len(moe.down_proj), moe(x.chunk(2)[backend.worker]).tolist()
        >>> linop.launch(main, workers=2)  # two experts on each; all give (x₁ + x₂)² twice
        [(2, [[4.0, 4.0], [4.0, 4.0]]), (2, [[9.0, 9.0]])]
    """

    router: Tensor | None
    gate_up_proj: Tensor
    down_proj: Tensor

    def __init__(
        self,
        P_x: Partition,
        embed_dim: int,
        hidden_dim: int,
        num_experts: int,
        top_k: int = 2,
        capacity_factor: float | None = None,
        normalize: bool = True,
        activation: str = "silu",
        device: Any = None,
        dtype: Any = None,
        x_axes: Sequence[Axis] | None = None,
    ) -> None:
        super().__init__([P_x], P_x)
        if not 1 <= top_k <= num_experts:
            raise ArgumentError(
                f"MixtureOfExperts: top_k={top_k} of num_experts={num_experts}; one at least, and "
                f"no more than there are, expected"
            )
        check_capacity("MixtureOfExperts", capacity_factor)
        if activation not in ACTIVATIONS:
            raise ArgumentError(
                f"MixtureOfExperts: activation={activation!r}; one of {', '.join(ACTIVATIONS)} "
                f"expected"
            )
        self.embed_dim, self.hidden_dim, self.num_experts = embed_dim, hidden_dim, num_experts
        self.top_k, self.capacity_factor, self.normalize = top_k, capacity_factor, normalize
        self.activation, self.x_axes = activation, x_axes
        self._group = Partition((P_x.size,), P_x.workers)

        def make() -> Any:
            empty = {
                "router": (num_experts, embed_dim),
                "gate_up_proj": (num_experts, 2 * hidden_dim, embed_dim),
                "down_proj": (num_experts, embed_dim, hidden_dim),
            }
            whole = torch.nn.Module()
            for name, shape in empty.items():
                p = torch.nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
                bound = max(1, shape[-1]) ** -0.5
                torch.nn.init.uniform_(p, -bound, bound)
                whole.register_parameter(name, p)
            return whole

        whole = drawn(self, make)
        first = Partition((1,), P_x.workers[:1])
        for name in ("router", "gate_up_proj", "down_proj"):
            p, grid = getattr(whole, name), first if name == "router" else self._group
            axes: list[Axis] = [COPIES if name == "router" else 0]
            hold(self, name, TensorSpace(tuple(p.shape), grid, axes=axes), p)

    def axes(self, number: int, ndim: int) -> Sequence[Axis]:
        found = super().axes(number, ndim)
        for role, parts in zip(found, self.inputs[0].shape, strict=True):
            if parts > 1 and (not isinstance(role, int) or role == ndim - 1):
                what = f"holds {role}" if not isinstance(role, int) else "splits the features"
                raise PartitionError(
                    f"MixtureOfExperts: a grid axis of {self.inputs[0]!r} {what}; axes that split "
                    f"other dimensions expected"
                )
        return found

    def forward(self, x: Tensor | None, losses: bool = False) -> Any:  # type: ignore[override]
        """This worker's block of the result.

        Args:
            x: its block of the tokens.
            losses: True: the result is a pair of the block and this worker's `RouterLosses`, whose
                sums over the workers are those of all tokens; the same on all workers.
        """
        call = self.compiled if torch.compiler.is_dynamo_compiling() else self.recorded
        y, *terms = call(x, losses)
        return (y, RouterLosses(*terms)) if losses else y

    def called_by_code(self, x: Tensor | None, losses: bool) -> Any:
        return self.recorded(x, losses)

    def recorded(self, x: Tensor | None, losses: bool) -> Any:
        """The block, and the losses, in one tuple; see `forward`."""
        self._call_options = (int(losses),)
        y = super().forward(x)
        return (y, *self.__dict__.pop("_found")) if losses else (y,)

    def bind(self, *inputs: TensorSpace) -> Function:
        (X,) = inputs
        n = self.embed_dim
        if X.ndim < 1 or X.global_shape[-1] != n:
            raise ShapeError(
                f"MixtureOfExperts: an input of shape {X.global_shape}; (…, {n}) expected"
            )
        tokens = math.prod(X.global_shape[:-1])
        held = self.spaces["router"]
        W = TensorSpace(held.global_shape, held.partition, X.dtype, held.axes, "router")
        spread = self.moved(broadcast, W, self._group)
        capacity = slots_of_expert(self.capacity_factor, self.top_k, tokens, self.num_experts)
        wants_losses = bool(self._call_options and self._call_options[0])
        sizes = self.top_k, self.num_experts, capacity
        exchange = Exchange(self, self._group, n, X.dtype, *sizes, self._compute)
        if self.worker not in self._group:
            return lambda x: self._outside(X, exchange, spread, x, wants_losses)

        def mixture(x: Tensor) -> Tensor:
            rows = x.reshape(-1, n)
            logits = torch.nn.functional.linear(rows, spread(self.router))
            indices, gates = routed(logits, self.top_k, self.normalize)
            experts = self.gate_up_proj, self.down_proj
            y, counts = exchange(rows, indices, gates, *experts)
            if wants_losses:
                self.__dict__["_found"] = router_losses(logits, counts, tokens)
            return y.reshape(x.shape)

        return mixture

    def _outside(
        self,
        X: TensorSpace,
        exchange: Exchange,
        spread: Function,
        x: Tensor | None,
        wants_losses: bool,
    ) -> Tensor:
        """The call on a worker without tokens and experts, which takes part in the others'."""
        there: Any = spread(None)  # None where it moves nothing
        y = zero_volume_result(X, there, exchange.outside(x))
        if wants_losses:
            none = add_dependency(y.new_zeros(()), y)
            self.__dict__["_found"] = RouterLosses(none, none)
        return y

    def _compute(self, rows: Tensor, counts: list[int], up: Tensor, down: Tensor) -> Tensor:
        act, linear, found = ACTIVATIONS[self.activation], torch.nn.functional.linear, []
        if not len(rows):
            empty = rows.new_zeros(0, self.embed_dim)
            return tied(empty, rows, up, down)
        for own, first, second in zip(rows.split(counts), up, down, strict=True):
            if len(own):
                gate, value = linear(own, first).chunk(2, -1)
                found.append(linear(act(gate) * value, second))
        return torch.cat(found)

    def extra_repr(self) -> str:
        return (
            f"{self.inputs[0]}, embed_dim={self.embed_dim}, hidden_dim={self.hidden_dim}, "
            f"num_experts={self.num_experts}, top_k={self.top_k}, "
            f"capacity_factor={self.capacity_factor}"
        )


def check_capacity(name: str, factor: float | None) -> None:
    """Check a factor of capacity.

    Raises:
        ArgumentError: it is negative, or no number.
    """
    fits = factor is None or (isinstance(factor, int | float) and 0 <= factor < math.inf)
    if not fits:
        raise ArgumentError(
            f"{name}: capacity_factor={factor!r}; a number from 0, or None, where nothing is "
            f"dropped, expected"
        )


def slots_of_expert(factor: float | None, k: int, tokens: int, experts: int) -> int | None:
    """The capacity of an expert; None: any."""
    return None if factor is None else math.ceil(factor * k * tokens / experts)
