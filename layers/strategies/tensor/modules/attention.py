"""`torch.nn.MultiheadAttention` cut by heads: its projections, in one tensor or in three, by
output; the last one by input."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout, linear, pad, scaled_dot_product_attention

from linop.layers.parameters.packing import Packing
from linop.spaces.decomposition import COPIES, REPLICATED
from linop.strategies.mesh import Axis
from linop.strategies.tensor.conversions import held, hold
from linop.strategies.tensor.layouts import Layout
from linop.strategies.tensor.modules.layer import ParallelLayer, Redistribute
from linop.strategies.tensor.modules.linear import RowwiseLinear


class ParallelAttention(ParallelLayer):
    """A `torch.nn.MultiheadAttention` of this worker's heads, with its arguments and its results.

    Projections are by torch's functions, as are products and softmax, which are followed as those
    of any module: so dropout draws the same numbers for any number of workers. Averaged weights are
    summed over the workers, others gathered.

    Args:
        axis: the axis.
        whole: the sequential module.
        input, output: layouts of queries, keys and values, and of the result.
        heads: of each worker.
    """

    in_proj_weight: Tensor | None
    in_proj_bias: Tensor | None
    bias_k: Tensor | None
    bias_v: Tensor | None

    def __init__(
        self, axis: Axis, whole: Any, input: Layout, output: Layout, heads: Sequence[int]
    ) -> None:
        super().__init__(axis, [input] * 3, output)
        self.embed_dim, self.num_heads, self.dropout = (
            whole.embed_dim,
            whole.num_heads,
            whole.dropout,
        )
        self.head_dim, self.batch_first = whole.head_dim, whole.batch_first
        self.add_zero_attn, self.heads = whole.add_zero_attn, tuple(heads)
        self.kdim, self.vdim = whole.kdim, whole.vdim
        # Of torch's transformer layers, which otherwise compute with the parameters themselves.
        self._qkv_same_embed_dim = False
        self._in_one = whole._qkv_same_embed_dim
        sizes = [n * self.head_dim for n in heads]
        self.packings = {}
        for name in "q_proj_weight", "k_proj_weight", "v_proj_weight":
            self.hold_cut(name, getattr(whole, name), 0, sizes)
        for name in "in_proj_weight", "in_proj_bias":
            p = getattr(whole, name)
            if p is not None:
                self.packings[name] = packing = Packing(0, (tuple(sizes),) * 3)
                p = torch.nn.Parameter(packing.packed(p.detach()), p.requires_grad)
            self.hold_cut(name, p, 0, [3 * n for n in sizes])
        for name in "bias_k", "bias_v":
            self.hold_cut(name, getattr(whole, name), 2, sizes)
        self.out_proj = RowwiseLinear(axis, whole.out_proj, -1, output, sizes)
        hold(self, "inputs", [Redistribute(axis, input, COPIES)] if input is not COPIES else [])
        hold(self, "masks", [Redistribute(axis, REPLICATED, COPIES)])
        hold(self, "masks of heads", [Redistribute(axis, REPLICATED, 1, self.num_heads)])
        hold(self, "averages", [Redistribute(axis, COPIES, REPLICATED)])
        hold(self, "weights", [Redistribute(axis, 1, REPLICATED)])

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """See `torch.nn.MultiheadAttention`."""
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")  # as torch
        batched = query.ndim == 3
        q, k, v = self._projected([self._rows(x, batched) for x in self._copies(query, key, value)])
        mask = self._mask(attn_mask, key_padding_mask, q, k)
        weights = None
        p = self.dropout if self.training else 0.0
        if need_weights:
            scores = q / sqrt(self.head_dim) @ k.transpose(-2, -1)
            weights = torch.softmax(scores if mask is None else scores + mask, -1)
            weights = dropout(weights, p) if p else weights
            y = weights @ v
        else:
            y = scaled_dot_product_attention(q, k, v, mask, p)
        y = self.out_proj(self._laid(y.transpose(1, 2).flatten(2), batched))
        return y, None if weights is None else self._shown(weights, average_attn_weights, batched)

    # Inputs and outputs

    def _copies(self, *inputs: Tensor) -> list[Tensor]:
        """Inputs as copies, each tensor once."""
        converts = held(self, "inputs")
        known: dict[int, Tensor] = {}
        for x in inputs:
            if id(x) not in known:
                known[id(x)] = converts[0](x) if converts else x
        return [known[id(x)] for x in inputs]

    def _rows(self, x: Tensor, batched: bool) -> Tensor:
        """As (batch, length, features)."""
        if not batched:
            return x[None]
        return x if self.batch_first else x.transpose(0, 1)

    def _laid(self, y: Tensor, batched: bool) -> Tensor:
        """As the inputs are."""
        if not batched:
            return y[0]
        return y if self.batch_first else y.transpose(0, 1)

    def _projected(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Queries, keys and values of this worker's heads: (batch, heads, length, width)."""
        types = None if self.calls is None else self.calls.types
        with nullcontext() if types is None else types.suspended():
            found = []
            for x, weight, bias in zip(inputs, *self._parts(), strict=True):
                found.append(linear(x, weight, bias))
            if self.bias_k is not None and self.bias_v is not None:
                for n, more in (1, self.bias_k), (2, self.bias_v):
                    found[n] = torch.cat([found[n], more.expand(len(found[n]), -1, -1)], 1)
            if self.add_zero_attn:
                found[1:] = [pad(x, (0, 0, 0, 1)) for x in found[1:]]
            found = [x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for x in found]
        if types is not None:
            for x in found:
                types.mark(x, types.cut(1, 4, self.heads))
        return found

    def _parts(self) -> tuple[Sequence[Any], Sequence[Any]]:
        """Weights and biases of the projections."""
        biases = [None] * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        if self._in_one:
            assert self.in_proj_weight is not None
            return self.in_proj_weight.chunk(3), biases
        return [getattr(self, f"{name}_proj_weight") for name in "qkv"], biases

    # Masks

    def _mask(self, mask: Any, padding: Any, q: Tensor, k: Tensor) -> Tensor | None:
        """The terms added to the scores: (batch or 1, heads or 1, length, length)."""
        given = mask if padding is None else padding
        more = 0 if given is None else k.shape[2] - given.shape[-1]
        found = None
        if mask is not None:
            mask = self._added(mask, q, more)
            if mask.ndim == 3 and len(mask) != 1:  # of each head
                mask = mask.view(-1, self.num_heads, *mask.shape[1:])
                found = held(self, "masks of heads")[0](mask)
            else:
                found = self._whole(mask.view(1, 1, *mask.shape[-2:]))
        if padding is not None:
            padding = self._added(padding, q, more)
            padding = padding if padding.ndim == 2 else padding[None]
            padding = self._whole(padding[:, None, None, :])
            found = padding if found is None else found + padding
        return found

    def _added(self, mask: Tensor, q: Tensor, more: int) -> Tensor:
        """A mask as numbers that are added; True stands for a place that does not count."""
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(mask, -torch.inf)
        return pad(mask, (0, more)) if more else mask

    def _whole(self, mask: Tensor) -> Tensor:
        """A mask for all heads; of one that is trained, terms of its gradient are summed."""
        return held(self, "masks")[0](mask) if mask.requires_grad else mask

    # Weights

    def _shown(self, weights: Tensor, average: bool, batched: bool) -> Tensor:
        """The weights, of all heads, as torch gives them."""
        types = None if self.calls is None else self.calls.types
        if average:
            with nullcontext() if types is None else types.suspended():
                term = weights.sum(1) / self.num_heads
            if types is not None:
                types.mark(term, COPIES)
            found: Tensor = held(self, "averages")[0](term)
        else:
            found = held(self, "weights")[0](weights)
        return found if batched else found[0]
