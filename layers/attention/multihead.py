"""Multi-head attention of tensors in blocks: heads cut along one axis of a grid, the sequence and
the batch along others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from linop.backends import use
from linop.backends.autograd.functions import add_dependency
from linop.backends.autograd.real_calls import apart
from linop.errors import ArgumentError, PartitionError, ShapeError
from linop.layers.attention.attention import Settings, attention_of
from linop.layers.layer import Function, Layer
from linop.layers.parameters.weights import drawn, hold
from linop.layers.zero_volume import zero_volume_result
from linop.normal_form.matching import Segment
from linop.operators.collectives import repartition
from linop.operators.named_movement import collective
from linop.spaces.decomposition import COPIES, REPLICATED, Axis
from linop.spaces.partition import Partition, balanced
from linop.spaces.tensor import TensorSpace


class MultiheadAttention(Layer):
    """`torch.nn.MultiheadAttention`, with heads and sequence in blocks; it has torch's parameters,
    by torch's names.

    Inputs are of shape (length, batch, embed_dim), or (batch, length, embed_dim) if `batch_first`.
    The grid axis that splits their features, or whose role is `linop.REPLICATED`, cuts the heads:
    each worker has the weights of its own, and their products are summed into the output, whose
    features are split, or replicated, as the input's. One that splits the sequence is a ring, or an
    all-to-all. The weights are held in blocks along the axis of the heads, at coordinate 0 of the
    others.

    Args:
        P_x: the partition of inputs and output; axis k of the grid splits dimension k.
        embed_dim, bias, kdim, vdim, batch_first, device, dtype: as in torch.nn.
        num_heads: any number that divides `embed_dim`, also fewer than there are workers.
        dropout: as in torch.nn; its zeros do not depend on the cut.
        add_bias_kv, add_zero_attn: not supported.
        x_axes: roles of the grid axes, where they are others, as in `linop.TensorSpace`.
        method, zigzag: of sequences that are cut, as of
            `linop.layers.scaled_dot_product_attention`.

    Raises:
        ArgumentError: an argument is not supported, or heads do not divide `embed_dim`;
            PartitionError: several grid axes cut the heads.

    Example:
        >>> P, x = linop.Partition((2,)), torch.rand(6, 1, 4)  # a sequence of 6, in halves
        >>> twin = torch.nn.MultiheadAttention(4, 2)
        >>> def main(backend):
        ...     attention, mine = layers.MultiheadAttention(P, 4, 2), x.chunk(2)[backend.worker]
        ...     layers.scatter_state(attention, twin.state_dict())
        ...     return attention(mine, mine, mine)[0]
        >>> y = torch.cat(linop.launch(main, workers=2))
        >>> torch.allclose(y, twin(x, x, x)[0], atol=1e-5)
        True
    """

    in_proj_weight: Tensor | None
    in_proj_bias: Tensor | None

    def __init__(
        self,
        P_x: Partition,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: Any = None,
        *,
        x_axes: Sequence[Axis] | None = None,
        method: str = "ring",
        zigzag: bool = False,
    ) -> None:
        if add_bias_kv or add_zero_attn:
            raise ArgumentError(
                "MultiheadAttention: add_bias_kv and add_zero_attn are not supported; concatenate "
                "a token to keys and values before they are cut"
            )
        if num_heads < 1 or embed_dim < 1 or embed_dim % num_heads:
            raise ArgumentError(
                f"MultiheadAttention: embed_dim={embed_dim}, num_heads={num_heads}; a multiple of "
                f"the number of heads expected"
            )
        super().__init__([P_x] * 3, None)
        self.embed_dim, self.num_heads, self.dropout = embed_dim, num_heads, dropout
        self.batch_first, self.x_axes, self.method, self.zigzag = (
            batch_first,
            x_axes,
            method,
            zigzag,
        )
        self.cut = heads_axis(P_x, self.axes(0, 3), 3)
        self.out_proj = _Output(P_x, embed_dim, bias, device, dtype, tuple(self.axes(0, 3)))
        widths = embed_dim, kdim or embed_dim, vdim or embed_dim
        packed = len({*widths}) == 1
        whole = drawn(self, lambda: _Inputs(widths, packed, bias, device, dtype))
        for name in ("in_proj_weight", *_SEPARATE, "in_proj_bias"):
            held_along(self, name, getattr(whole, name), 0)

    def axes(self, number: int, ndim: int) -> Sequence[Axis]:
        grid = self.inputs[0]
        if ndim != 3:
            raise ShapeError(
                f"MultiheadAttention: an input of {ndim} dimensions; 3 expected: length, batch and "
                f"features (unsqueeze a batch of one)"
            )
        axes = range(grid.ndim) if self.x_axes is None else self.x_axes
        found = [k % ndim if isinstance(k, int) else k for k in axes]
        if len(found) != grid.ndim or COPIES in found:
            raise PartitionError(
                f"MultiheadAttention: axes {tuple(axes)} of {grid!r}; for each, a dimension or "
                f"linop.REPLICATED expected"
            )
        return found

    def bind(self, *inputs: TensorSpace) -> Function:
        """Function to this worker's heads of queries, keys and values, (batch, heads, length,
        features)."""
        size = self.embed_dim // self.num_heads
        parts = 1 if self.cut is None else self.inputs[0].shape[self.cut]
        lengths = [n * size for n in balanced(self.num_heads, parts)]
        steps = [self._projection(k, X, lengths) for k, X in enumerate(inputs)]
        if self.worker not in self.inputs[0]:
            return lambda *xs: tuple(  # type: ignore[return-value]
                zero_volume_result(X, x) for X, x in zip(inputs, xs, strict=True)
            )
        mine = 0 if self.cut is None else self.inputs[0].coordinates(self.worker)[self.cut]
        heads = lengths[mine] // size

        def projected(*xs: Tensor) -> Any:
            made = (step(x) for step, x in zip(steps, xs, strict=True))
            found = [y.unflatten(-1, (heads, size)) for y in made]
            if self.batch_first:
                return tuple(y.transpose(1, 2) for y in found)
            return tuple(y.permute(1, 2, 0, 3) for y in found)

        return projected

    def _projection(self, number: int, X: TensorSpace, lengths: Sequence[int]) -> Function:
        """Function from this worker's block of an input to its heads' features. Collective."""
        axes = [COPIES if k == self.cut else axis for k, axis in enumerate(X.axes)]
        bounds = {d: X.bounds[d] for d in range(X.ndim) if d in axes}
        wanted = TensorSpace(X.global_shape, X.partition, X.dtype, axes, X.name, bounds=bounds)
        spread = self.moved(repartition, X, wanted, of=number)
        packed = "in_proj_weight" in self.spaces
        name = "in_proj_weight" if packed else _SEPARATE[number]
        width = self.spaces[name].global_shape[1]
        if X.global_shape[-1] != width:
            raise ShapeError(
                f"MultiheadAttention: an input of shape {X.global_shape}; (…, {width}) expected"
            )
        start = number * self.embed_dim
        weight = spread_along(self, name, X, 0, lengths, start if packed else 0)
        bias = None
        if "in_proj_bias" in self.spaces:
            bias = spread_along(self, "in_proj_bias", X, 0, lengths, start)
        linear = torch.nn.functional.linear
        return lambda x: linear(spread(x), weight(), None if bias is None else bias())

    def forward(  # type: ignore[override]
        self,
        query: Tensor | None,
        key: Tensor | None,
        value: Tensor | None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """This worker's block of the output, and None. Collective.

        Args:
            query, key, value: its blocks; None on workers that have none.
            key_padding_mask: (batch, all keys) of this worker's part of the batch: True, or -inf,
                for keys that are not taken.
            need_weights, average_attn_weights: the matrix of weights is nowhere whole;
                need_weights=True is an error.
            attn_mask: (rows, all keys) or (batch times heads, rows, all keys), of this worker's
                queries and heads: True for keys that are not taken, or what is added to the scores.
            is_causal: the mask is the causal one, which need not be given.

        Raises:
            ArgumentError: need_weights=True. Others as of
                `linop.layers.scaled_dot_product_attention`.
        """
        del average_attn_weights
        if need_weights:
            raise ArgumentError(
                "MultiheadAttention: need_weights=True, but the matrix of weights is nowhere "
                "whole; need_weights=False expected"
            )
        if torch.compiler.is_dynamo_compiling():
            given = query, key, value, key_padding_mask, attn_mask, is_causal
            return self.compiled(*given), None
        return self.recorded(query, key, value, key_padding_mask, attn_mask, is_causal), None

    def called_by_code(self, query: Any, key: Any, value: Any, *rest: Any) -> Any:
        padding, mask, causal = rest
        return self.forward(query, key, value, padding, False, mask, True, causal)[0]

    def recorded(
        self,
        query: Tensor | None,
        key: Tensor | None,
        value: Tensor | None,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        is_causal: bool,
    ) -> Tensor:
        """The block of the output; see `forward`."""
        q, k, v = super().forward(query, key, value)
        mask = None if is_causal else attn_mask
        mask = merged(mask, key_padding_mask, q)
        dropout = self.dropout if self.training else 0.0
        settings = Settings(
            dropout, is_causal, None, False, self.method, self.zigzag, mask is not None
        )
        where = {self.axes(0, 3).index(d): d for d in range(2) if d in self.axes(0, 3)}
        names = (0, 2) if self.batch_first else (2, 0)
        axes: list[Axis] = [
            1 if g == self.cut else names[where[g]] if g in where else REPLICATED
            for g in range(self.inputs[0].ndim)
        ]
        layer = apart(self._attention, settings, axes)
        y = layer(q, k, v) if mask is None else layer(q, k, v, mask)
        if self.worker in self.inputs[0]:
            order = (0, 2, 1, 3) if self.batch_first else (2, 0, 1, 3)
            y = y.permute(order).flatten(2)
        result: Tensor = self.out_proj(y)
        return result

    def _attention(self, settings: Settings, axes: Sequence[Axis]) -> Layer:
        with use(self.backend):
            return attention_of(self.inputs[0], settings, axes)

    def extra_repr(self) -> str:
        return f"{self.inputs[0]}, embed_dim={self.embed_dim}, num_heads={self.num_heads}"


_SEPARATE = "q_proj_weight", "k_proj_weight", "v_proj_weight"


class _Inputs(torch.nn.Module):
    """Projections of inputs, drawn as torch.nn.MultiheadAttention draws them."""

    def __init__(
        self, widths: Sequence[int], packed: bool, bias: bool, device: Any, dtype: Any
    ) -> None:
        super().__init__()
        n = widths[0]
        shapes: dict[str, tuple[int, ...] | None] = {"in_proj_weight": None}
        shapes |= dict.fromkeys(_SEPARATE)
        if packed:
            shapes["in_proj_weight"] = 3 * n, n
        else:
            shapes |= {name: (n, width) for name, width in zip(_SEPARATE, widths, strict=True)}
        for name, shape in shapes.items():
            if shape is None:
                self.register_parameter(name, None)
                continue
            empty = torch.empty(shape, device=device, dtype=dtype)
            self.register_parameter(name, torch.nn.Parameter(empty))
            torch.nn.init.xavier_uniform_(self._parameters[name])  # type: ignore[arg-type]
        self.register_parameter("in_proj_bias", None)
        if bias:
            empty = torch.empty(3 * n, device=device, dtype=dtype)
            self.in_proj_bias = torch.nn.Parameter(empty)
            torch.nn.init.constant_(self.in_proj_bias, 0.0)


class _Output(Layer):
    """The projection of all heads, whose products are summed.

    Args:
        P_x: the partition of the output.
        size: features of the output.
        bias, device, dtype: as in torch.nn.
        x_axes: roles of the grid axes.
    """

    weight: Tensor | None
    bias: Tensor | None

    def __init__(
        self,
        P_x: Partition,
        size: int,
        bias: bool,
        device: Any,
        dtype: Any,
        x_axes: tuple[Axis, ...],
    ) -> None:
        super().__init__([P_x], P_x)
        self.x_axes, self.cut = x_axes, heads_axis(P_x, x_axes, 3)

        def make() -> Any:
            linear = torch.nn.Linear(size, size, bias, device, dtype)
            if bias:
                torch.nn.init.constant_(linear.bias, 0.0)
            return linear

        whole = drawn(self, make)
        held_along(self, "weight", whole.weight, 1)
        held_along(self, "bias", whole.bias, None)

    def axes(self, number: int, ndim: int) -> Sequence[Axis]:
        return [2 if k == self.cut else axis for k, axis in enumerate(super().axes(number, ndim))]

    def output_axes(self, grid: Partition, ndim: int) -> Sequence[Axis]:
        return super().axes(0, ndim)

    def bind(self, *inputs: TensorSpace) -> Function:
        (X,) = inputs
        lengths = [b - a for a, b in X.bounds[2]]
        weight = spread_along(self, "weight", X, 1, lengths, 0)
        bias = None
        if "bias" in self.spaces:
            bias = spread_along(self, "bias", X, None, [], 0)
        kept = {d: X.bounds[d] for d in range(2) if d in X.axes}
        size = self.spaces["weight"].global_shape[0]
        shape = (*X.global_shape[:2], size)
        axes = [COPIES if k == self.cut else axis for k, axis in enumerate(X.axes)]
        products = TensorSpace(shape, X.partition, X.dtype, axes, bounds=kept)
        Y = TensorSpace(shape, X.partition, X.dtype, self.x_axes, bounds=kept)
        total: Function = lambda x: x  # noqa: E731
        if self.cut is not None:
            total = self.moved(collective, "R", "heads", products, Y)
        if self.worker not in X.partition:
            return lambda x: zero_volume_result(Y, x)
        first = self.cut is None or X.partition.coordinates(self.worker)[self.cut] == 0
        linear = torch.nn.functional.linear

        def project(x: Tensor) -> Tensor:
            added = None if bias is None else bias()
            if first or added is None:
                return total(linear(x, weight(), added))
            # The workers of the first heads add it; all take part in its way here, and back.
            return total(add_dependency(linear(x, weight()), added))

        return project


# Weights


def heads_axis(P_x: Partition, axes: Sequence[Axis], ndim: int) -> int | None:
    """The grid axis that cuts the heads: it splits the features, or replicates the input.

    Raises:
        PartitionError: there are several.
    """
    found = [
        k
        for k, (axis, n) in enumerate(zip(axes, P_x.shape, strict=True))
        if n > 1 and (axis is REPLICATED or axis == ndim - 1)
    ]
    if len(found) > 1:
        raise PartitionError(
            f"MultiheadAttention: axes {found} of {P_x!r} both cut the heads; one at most expected"
        )
    return found[0] if found else None


def held_along(layer: Any, name: str, whole: Tensor | None, dim: int | None) -> None:
    """Register this worker's block of a parameter, cut along the axis of the heads; at coordinate 0
    of the other grid axes.

    Args:
        layer: with the number of that axis, `cut`.
        whole: the sequential layer's; None: there is none.
        dim: the dimension that is cut; None: it is whole on one worker.
    """
    if whole is None:
        layer.register_parameter(name, None)
        return
    (grid, *_) = layer.inputs
    cut = None if dim is None else layer.cut
    owners = grid[tuple(slice(None) if k == cut else slice(0, 1) for k in range(grid.ndim))]
    axes = [dim if k == cut and dim is not None else COPIES for k in range(grid.ndim)]
    hold(layer, name, TensorSpace(tuple(whole.shape), owners, axes=axes), whole)


def spread_along(
    layer: Any, name: str, X: TensorSpace, dim: int | None, lengths: Sequence[int], start: int
) -> Callable[[], Tensor]:
    """Function without arguments to the part of a parameter that this worker's heads need: a
    movement, whose adjoint sums the gradients. Collective.

    Args:
        X: the space of the input, on whose workers it is needed.
        dim: the dimension that is cut along the axis of the heads; None: all need the whole.
        lengths: of the blocks.
        start: of the part in the parameter that is cut, along that dimension.
    """
    held = layer.spaces[name]
    here = TensorSpace(
        held.global_shape,
        held.partition,
        X.dtype,
        held.axes,
        name,
        bounds=dict(enumerate(held.bounds)),
    )
    shape = list(held.global_shape)
    sizes, segments = {}, None
    axes: list[Axis] = [COPIES] * X.partition.ndim
    if dim is not None:
        shape[dim] = sum(lengths)
        if layer.cut is not None:
            axes[layer.cut] = dim
            sizes = {dim: lengths}
        segments = {dim: (Segment(0, start, shape[dim]),)}
    wanted = TensorSpace(shape, X.partition, X.dtype, axes, name, sizes=sizes)
    move = layer.moved(collective, "P", name, here, wanted, segments=segments)
    return lambda: move(getattr(layer, name))


def merged(mask: Tensor | None, padding: Tensor | None, q: Tensor) -> Tensor | None:
    """torch.nn.MultiheadAttention's two masks as one of scaled_dot_product_attention."""
    found: list[Tensor] = []
    if mask is not None:
        found.append(mask.unflatten(0, (len(q), -1)) if mask.ndim == 3 else mask)
    if padding is not None:
        found.append(padding[:, None, None])
    if not found:
        return None
    if all(one.dtype is torch.bool for one in found):
        taken = ~found[0]
        return taken if len(found) == 1 else taken & ~found[1]
    added = [
        torch.zeros_like(one, dtype=q.dtype).masked_fill(one, -torch.inf)
        if one.dtype is torch.bool
        else one
        for one in found
    ]
    return added[0] if len(added) == 1 else added[0] + added[1]
