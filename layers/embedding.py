"""Distributed embedding: a table of vectors in blocks; each worker looks up the rows it holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from linop.errors import ArgumentError, DTypeError, PartitionError, expect
from linop.layers.layer import Function, Layer, empty_block, zero_volume_result
from linop.layers.linear import dense_axes
from linop.layers.parameters.weights import drawn, hold
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
        num_embeddings, embedding_dim, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse,
            device, dtype: as in torch.nn. Sparse gradients are those of a worker's block.
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
    """

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

        def looked_up(x: Tensor) -> Tensor:
            x = spread(x)
            assert self.weight is not None
            if 0 in mine or 0 in self.weight.shape:
                return summed(empty_block(mine, self.weight))
            here = (rows.start <= x) & (x < rows.stop)
            found = self._rows(x[here] - rows.start, rows)
            return summed(found.new_zeros(mine).index_put((here,), found))

        return looked_up

    def _rows(self, x: Tensor, rows: slice) -> Tensor:
        assert self.weight is not None
        padding = self.padding_idx
        if padding is not None:
            padding = padding - rows.start if rows.start <= padding < rows.stop else None
        return torch.nn.functional.embedding(
            x,
            self.weight,
            padding,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.sparse,
        )

    def extra_repr(self) -> str:
        return (
            f"{self.inputs[0]} → {self.P_W} → {self.output}, {self.num_embeddings}, "
            f"{self.embedding_dim}, padding_idx={self.padding_idx}"
        )
