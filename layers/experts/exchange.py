"""Tokens to the workers of their experts and back, for routings that change at every call.

All workers first hear how many tokens each has for each expert. Then rows move by an all-to-all of
equal blocks, as long as the largest number of rows from one worker to one, rounded up, so that its
plan serves other calls; the way back is its adjoint. What is around it are index operations
of torch (`linop.layers.experts.slots`). So no derivative is written here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from linop.backends.autograd.dtypes import torch_dtype
from linop.backends.autograd.functions import add_dependency, apply
from linop.backends.autograd.kept_graphs import KeptGraph, autocast_of, in_autocast
from linop.backends.autograd.real_calls import is_tracing
from linop.layers.agreement.input_agreement import Cache
from linop.layers.experts.slots import counts_of, kept_of, most_rows, slots_of
from linop.layers.layer import Layer
from linop.operators.collectives import all_to_all, repartition
from linop.operators.operator import LinearOperator
from linop.spaces.decomposition import REPLICATED
from linop.spaces.partition import Partition
from linop.spaces.scalars import Array
from linop.spaces.tensor import TensorSpace

Compute = Callable[..., Tensor]
"""Function of rows, in the order of this worker's experts, of how many each expert has, and of
these experts' parameters."""

_PLANS = 64
"""Operators of blocks that a layer keeps: those of 8 octaves."""


def rounded(rows: int) -> int:
    """Rows of a block: at least so many, and at most an eighth, or 7, more; 8 different numbers in
    each octave."""
    step = 1 << max(3, rows.bit_length() - 4)
    return max(1, -(-rows // step)) * step


class Exchange:
    """Rows of features to experts that are cut over workers, in balanced blocks, and back.
    Collective among these, as its calls are.

    Args:
        layer: whose workers take part.
        group: the workers, in the order of tokens.
        features: of a row.
        dtype: of rows, NumPy's.
        k: experts of a token.
        experts: of all workers.
        capacity: slots of an expert, as of `linop.Routing`.
        compute: the experts.
    """

    def __init__(
        self,
        layer: Layer,
        group: Partition,
        features: int,
        dtype: Any,
        k: int,
        experts: int,
        capacity: int | None,
        compute: Compute,
    ) -> None:
        self._compute, self._nodes = compute, dict[Any, KeptGraph]()
        self._layer, self._experts, self._capacity = layer, experts, capacity
        self._workers = group.size
        self._index = group.workers.index(layer.worker) if layer.worker in group else -1
        self._made = group, features, dtype
        self._backend, self._where = layer.backend, layer.__dict__["_where"]
        self._blocks = Cache[LinearOperator | None](_PLANS)
        counts = TensorSpace((group.size, k, experts), group, np.int64, [0], "counts")
        every = Partition((self._backend.workers or 1,))
        known = TensorSpace(counts.global_shape, every, np.int64, [REPLICATED], "counts")
        self._gather = self._shared(repartition, counts, known)

    def _shared(self, make: Any, *arguments: Any) -> LinearOperator | None:
        """The operator, with plans that layers share; None in a program of one worker."""
        if self._backend.workers in (None, 1):
            return None
        agreement = self._layer._agreement
        return agreement.shared_operator(make, arguments, {}, self._where)

    def __call__(
        self, x: Tensor, indices: Tensor, gates: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The experts' results for this worker's tokens, times gates, summed, in x's dtype; and the
        choices of each expert by the tokens of all workers, int64 of shape (experts,).

        Args:
            x: of shape (tokens, features).
            indices, gates: of shape (tokens, k).
            parameters: of this worker's experts.
        """
        if not is_tracing():
            return self._run(x, indices, gates, parameters)
        kind = autocast_of(x)
        forms = [(tuple(map(int, x.shape)), x.dtype), ((self._experts,), torch.int64)]

        def run(x: Tensor, gates: Tensor, *rest: Tensor) -> Sequence[Tensor]:
            with in_autocast(x, kind):
                return self._run(x, rest[-1], gates, rest[:-1])

        inputs = 2 + len(parameters)
        node = self._node((kind, x.dtype, inputs), run, 2, inputs, inputs + 1)
        y, choices = node.called(self._layer, forms, x, gates, *parameters, indices)
        return y, choices

    def _node(self, key: Any, run: Any, copied: int, inputs: int, arguments: int) -> KeptGraph:
        """The one that torch's graphs know, by what it depends on."""
        known = self._nodes.get(key)
        if known is None:
            name = type(self._layer).__name__
            known = self._nodes[key] = KeptGraph(run, copied, inputs, arguments, name)
        return known

    def _run(
        self, x: Tensor, indices: Tensor, gates: Tensor, parameters: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        mine, device = indices.detach().cpu().numpy(), x.device
        counts, kept = self._counts(counts_of(mine, self._experts))
        block = self._block(most_rows(kept))
        slots = slots_of(mine, counts, kept, self._index, self._capacity, block)
        there = self._moved(slots.block, x, torch.from_numpy(slots.tokens).to(device), False)
        arrived = torch.from_numpy(slots.arrived).to(device)
        rows = there.index_select(0, arrived)
        # Rows come back in the dtype in which they went, on any number of workers.
        y = self._compute(rows, slots.counts, *parameters).to(x.dtype)
        back = y.new_zeros((len(there), y.shape[1])).index_copy(0, arrived, y)
        back = self._moved(slots.block, back, None, True)
        each = back.index_select(0, torch.from_numpy(slots.rows).to(device))
        if slots.dropped is not None:  # also of what is not finite
            dropped = torch.from_numpy(slots.dropped).to(device)
            each = each.masked_fill(dropped.reshape(-1, 1), 0)
        each = each.view(*indices.shape, y.shape[1])
        kind = torch.promote_types(gates.dtype, each.dtype)  # gates may be wider, as in Mixtral
        summed = torch.bmm(gates.to(kind).unsqueeze(1), each.to(kind)).squeeze(1)
        return summed.to(each.dtype), torch.from_numpy(counts.sum((0, 1))).to(device)

    def outside(self, x: Tensor | None) -> Tensor:
        """The call on a worker of the program that is not of the group: a zero-volume tensor."""
        if not is_tracing():
            return self._run_outside(x)
        if x is None or not x.is_floating_point():
            x = torch.zeros(0)
        forms = [((0,), torch_dtype(self._made[2]))]
        node = self._node("outside", lambda x: [self._run_outside(x)], 1, 1, 1)
        return node.called(self._layer, forms, x)[0]

    def _run_outside(self, x: Tensor | None) -> Tensor:
        _, kept = self._counts(None)
        op = self._blocks[self._block(most_rows(kept))]
        if op is None:
            return add_dependency(torch.zeros(0), *([] if x is None else [x]))
        there = apply(op, x, self._backend, self._where)
        return apply(op.H, there, self._backend, self._where)  # type: ignore[no-any-return]

    def _counts(self, own: Array | None) -> tuple[Array, Array]:
        """All workers' tokens of each choice and expert, and how many of them are kept.

        Args:
            own: of this worker.
        """
        counts = None if own is None else own[None]
        if self._gather is not None:
            with torch.no_grad():
                device = self._backend.arrays.device
                given = None if own is None else torch.from_numpy(own[None]).to(device)
                found = apply(self._gather, given, self._backend, self._where)
            counts = found.cpu().numpy()
        assert counts is not None
        return counts, kept_of(counts, self._capacity)

    def _block(self, rows: int) -> int:
        """Rows of a block, for so many at most; its operator is made if there is none. The same on
        all workers, and when a call is recomputed, whatever came between."""
        if self._gather is None:
            return max(1, rows)
        block = rounded(rows)
        if block not in self._blocks:
            group, features, dtype = self._made
            shape = (self._workers, self._workers, block, features)
            X = TensorSpace(shape, group, dtype, [0], "rows")
            self._blocks.keep(block, self._shared(all_to_all, X, 0, 1))
        return block

    def _moved(self, block: int, x: Tensor, order: Tensor | None, back: bool) -> Tensor:
        """Blocks of rows from each worker to each, of a buffer; or in its adjoint.

        Args:
            order: rows of the buffer, as numbers of rows of x.
        """
        if order is not None:
            if len(x):
                x = x.index_select(0, order)
            else:  # no tokens here
                x = add_dependency(x.new_zeros((len(order), x.shape[1])), x)
        op = self._blocks.get(block)
        if op is None:
            return x
        n, features = self._workers, x.shape[1]
        shape = (n, 1, block, features) if back else (1, n, block, features)
        moved = apply(op.H if back else op, x.view(shape), self._backend, self._where)
        return moved.view(n * block, features)  # type: ignore[no-any-return]


def tied(y: Tensor, rows: Tensor, *parameters: Tensor | None) -> Tensor:
    """A result without rows that depends on those that experts got, none, and on parameters, whose
    gradients are zeros: backward passes through it on every worker."""
    parts = [p.reshape(-1)[:0] for p in parameters if p is not None]
    # Squares: backward needs the parameters, as that of workers with rows does.
    return add_dependency(y, rows, *(part * part for part in parts))
