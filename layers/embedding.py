"""Distributed embedding: a table of vectors in blocks; each worker looks up the rows it holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from linop.backends.autograd.real_calls import by_autograd, is_tracing, really
from linop.errors import ArgumentError, DTypeError, PartitionError, expect
from linop.layers.layer import Function, Layer
from linop.layers.linear import dense_axes
from linop.layers.parameters.weights import drawn, hold
from linop.layers.zero_volume import empty_block, zero_volume_result
from linop.operators.collectives import repartition
from linop.operators.named_movement import collective
from linop.spaces.decomposition import COPIES, Axis
from linop.spaces.partition import Partition
from linop.spaces.tensor import TensorSpace


class Embedding(Layer):
    """Rows of a table by their indices, as `torch.nn.Embedding`, with the table in blocks.

    The indices are broadcast to all of `P_W`; every worker looks up the rows that it holds, with
    zeros for all others, and the results are summed over the blocks of rows into the output.

    Args:
        P_x: the partition of the indices, an int64 tensor of any shape; grid axis k splits
            dimension k.
        num_embeddings, embedding_dim, padding_idx, max_norm, norm_type: as in torch.nn.
        scale_grad_by_freq, device, dtype: as in torch.nn.
        sparse: as in torch.nn; gradients are those of a worker's block.
        P_y: the partition of the output, of shape (…, embedding_dim); by default `P_x`. A grid of
            two axes splits the first and the last dimension, as for `Linear`; any other, axis k
            dimension k.
        P_W: the partition of the table: a grid over num_embeddings and embedding_dim. By default
            the workers of `P_x` split num_embeddings.

    Raises:
        PartitionError: `P_W` has not two axes. ArgumentError: `max_norm`, where `P_W` splits the
            rows, whose norms no worker knows; `sparse` with `scale_grad_by_freq`, which torch does
            not support; or padding_idx is no row.
        SubsetError: from a call, an index is out of range; on every worker, before anything is
            sent. It is an IndexError.

    Example:
        >>> P, x = linop.Partition((2,)), torch.tensor([3, 0]).chunk(2)
        >>> def main(backend):
        ...     table = layers.Embedding(P, 4, 2)  # two rows on each worker
        ...     layers.initialize(table, "weight", lambda w: w.copy_(torch.arange(8.0).view(4, 2)))
        ...     return table(x[backend.worker]).tolist()
        >>> linop.launch(main, workers=2)  # rows 3 and 0, each from the other worker
        [[[6.0, 7.0]], [[0.0, 1.0]]]
    """

    checks_values = True
    floating = False
    partitions_once = ("P_y", "P_W")
    weight: Tensor | None

    def __init__(
        self,
        P_x: Partition,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        device: Any = None,
        dtype: Any = None,
        *,
        P_y: Partition | None = None,
        P_W: Partition | None = None,
    ) -> None:
        if P_W is None:
            workers = expect(self._name, P_x, Partition).workers
            P_W = Partition((len(workers), 1), workers)
        super().__init__([P_x], P_x if P_y is None else P_y, P_W)
        if P_W.ndim != 2:
            raise PartitionError(f"Embedding: {P_W!r} for a table; a grid of two axes expected")
        if max_norm is not None and P_W.shape[1] > 1:
            raise ArgumentError(
                f"Embedding: max_norm={max_norm} with {P_W!r}, which splits the rows of the table: "
                f"no worker knows their norms. Split num_embeddings only"
            )
        if sparse and scale_grad_by_freq:
            raise ArgumentError("Embedding: scale_grad_by_freq has no sparse gradients in torch")
        self.P_W = P_W
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.max_norm, self.norm_type = max_norm, norm_type
        self.scale_grad_by_freq, self.sparse = scale_grad_by_freq, sparse
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ArgumentError(
                f"Embedding: padding_idx={padding_idx} for {num_embeddings} embeddings"
            )
        shape = num_embeddings, embedding_dim
        whole = drawn(
            self, lambda: torch.nn.Embedding(*shape, padding_idx, device=device, dtype=dtype)
        )
        self.padding_idx: int | None = whole.padding_idx
        hold(self, "weight", TensorSpace(shape, P_W), whole.weight)

    def invalid_values(self, tensors: Sequence[Tensor | None]) -> str:
        x = tensors[0]
        if not isinstance(x, torch.Tensor) or x.dtype is not torch.int64 or not x.numel():
            return ""
        low, high = (int(n) for n in torch.aminmax(x))
        if 0 <= low and high < self.num_embeddings:
            return ""
        return f"indices from {low} to {high}; there are {self.num_embeddings} embeddings"

    def output_axes(self, grid: Partition, ndim: int) -> Sequence[Axis]:
        return dense_axes(self._name, grid, ndim)

    def bind(self, *inputs: TensorSpace) -> Function:
        (X,) = inputs
        if X.dtype != np.int64:
            raise DTypeError(f"Embedding: indices of {X.dtype}; int64 expected: use .long()")
        shape, dtype = (*X.global_shape, self.embedding_dim), self.dtype_of("weight")
        assert self.output is not None
        indices = X.like(self.P_W, [COPIES, COPIES])
        found = TensorSpace(shape, self.P_W, dtype, [COPIES, X.ndim])
        axes = dense_axes(self._name, self.output, X.ndim + 1)
        Y = TensorSpace(shape, self.output, dtype, axes)
        spread = self.moved(repartition, X, indices)
        summed = self.moved(collective, "R", f"{self.P_W}→{self.output}", found, Y)
        if self.worker not in self.P_W:
            return lambda x: summed(zero_volume_result(found, spread(x)))
        mine = found.local_shape(self.worker)
        rows = self.spaces["weight"].slices(self.worker)[0]

        # In graphs, where shapes do not depend on values, these run with values.
        def renormalised(weight: Tensor, x: Tensor) -> Sequence[Tensor]:
            table = weight.clone()
            rows_of_block(x, table, rows.start, None, self.max_norm, self.norm_type)
            return [table]

        def sparse_rows(weight: Tensor, x: Tensor) -> Sequence[Tensor]:
            return [rows_of_block(x, weight, rows.start, self.padding_idx, sparse=True)]

        def looked_up(x: Tensor) -> Tensor:
            x = spread(x)
            assert self.weight is not None
            if 0 in mine or 0 in self.weight.shape:
                return summed(empty_block(mine, self.weight))
            if is_tracing() and (self.max_norm is not None or self.sparse):
                return summed(self._traced_rows(x, renormalised, sparse_rows))
            options = self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse
            return summed(rows_of_block(x, self.weight, rows.start, self.padding_idx, *options))

        return looked_up

    def _traced_rows(self, x: Tensor, renormalised: Any, sparse_rows: Any) -> Tensor:
        """Rows of this worker's block in a graph, by functions of the block and indices."""
        weight = self.weight
        assert weight is not None
        form = tuple(map(int, weight.shape)), weight.dtype
        if self.max_norm is not None:
            with torch.no_grad():
                block = weight.detach()
                block.copy_(really(self, renormalised, [form], block, x)[0])
        start = self.spaces["weight"].slices(self.worker)[0].start
        if not self.sparse:
            plain = None, 2.0, self.scale_grad_by_freq
            return rows_of_block(x, weight, start, self.padding_idx, *plain)
        of_rows = (*map(int, x.shape), form[0][1]), weight.dtype
        derivative = by_autograd(sparse_rows), [(*form, torch.sparse_coo)]
        return really(self, sparse_rows, [of_rows], weight, x, derivative=derivative)[0]

    def extra_repr(self) -> str:
        return (
            f"{self.inputs[0]} → {self.P_W} → {self.output}, {self.num_embeddings}, "
            f"{self.embedding_dim}, padding_idx={self.padding_idx}"
        )


def rows_of_block(
    x: Tensor,
    weight: Tensor,
    start: int,
    padding: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    by_frequency: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Rows of a table by their indices, of shape (*x.shape, features), as by
    `torch.nn.functional.embedding`: of a block of rows, and zeros for all others.

    Args:
        x: indices into the whole table.
        weight: the block, of one row at least.
        start: index of its first row.
        padding: of the whole table.
    """
    count = len(weight)
    here = (start <= x) & (x < start + count)
    if padding is not None:
        padding = padding - start if start <= padding < start + count else None
    lookup = torch.nn.functional.embedding
    if not is_tracing():
        found = lookup(x[here] - start, weight, padding, max_norm, norm_type, by_frequency, sparse)
        return found.new_zeros((*x.shape, weight.shape[1])).index_put((here,), found)
    # In graphs shapes do not depend on values: others are a row that is not used.
    other = 0
    if by_frequency:  # which counts them
        other, weight = count, torch.cat([weight, weight.new_zeros((1, weight.shape[1]))])
    at = torch.where(here, x - start, other)
    found = lookup(at, weight, padding, None, 2.0, by_frequency)
    return torch.where(here.unsqueeze(-1), found, 0)
