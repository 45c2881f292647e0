"""Embeddings whose table is cut by words (vocabulary-parallel) or by features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from linop.backends.autograd.real_calls import really
from linop.errors import ArgumentError, DTypeError, SubsetError
from linop.layers.embedding import rows_of_block
from linop.layers.layer import Function
from linop.spaces.decomposition import COPIES, REPLICATED
from linop.spaces.tensor import TensorSpace
from linop.strategies.mesh import Axis
from linop.strategies.tensor.layouts import Layout
from linop.strategies.tensor.modules.layer import ParallelLayer, laid_out_as


class ParallelEmbedding(ParallelLayer):
    """Rows of a table by their indices, which every worker has.

    Args:
        axis: the axis.
        whole: the sequential module, a `torch.nn.Embedding`.
        dim: the dimension of the table that is cut: 0, words, of which each worker finds its own,
            and the results are summed; or 1, features.
        output: layout of the output.
        sizes: lengths of the table's blocks.

    Raises:
        ArgumentError: the module has max_norm, sparse gradients, or gradients scaled by frequency.
        SubsetError: from a call, an index is out of range; it is an IndexError.
    """

    floating = False
    in_pieces = True  # a row is one worker's, and the others add zeros
    weight: Tensor

    def __init__(
        self, axis: Axis, whole: Any, dim: int, output: Layout, sizes: Sequence[int]
    ) -> None:
        super().__init__(axis, [REPLICATED], output)
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(whole, option):
                raise ArgumentError(f"Embedding: {option}= is not supported on several workers")
        self.num_embeddings, self.embedding_dim = whole.num_embeddings, whole.embedding_dim
        self.padding_idx, self.dim, self.sizes = whole.padding_idx, dim, tuple(sizes)
        self.embed_scale = getattr(whole, "embed_scale", None)  # of classes of transformers
        self.hold_cut("weight", whole.weight, dim, self.sizes)

    def bind(self, *inputs: TensorSpace) -> Function:
        (X,) = inputs
        if X.dtype.kind != "i":
            raise DTypeError(f"Embedding: indices of {X.dtype}; whole numbers expected")
        shape, dtype = (*X.global_shape, self.embedding_dim), self.dtype_of("weight")
        layout, cut = (X.ndim, {X.ndim: self.sizes}) if self.dim else (COPIES, None)
        found = TensorSpace(shape, X.partition, np.dtype(dtype), [layout], sizes=cut)
        Y, laid_out = self.converted(found, self.output_layout)
        rows, padding = self.spaces["weight"].slices(self.worker)[0], self.padding_idx

        def looked_up(x: Tensor) -> Tensor:
            really(self, self._check, [((0,), torch.uint8)], x)
            if self.dim:
                return laid_out(
                    self._scaled(torch.nn.functional.embedding(x, self.weight, padding))
                )
            return laid_out(self._scaled(rows_of_block(x, self.weight, rows.start, padding)))

        return laid_out_as(Y, looked_up)

    def _scaled(self, values: Tensor) -> Tensor:
        scale = self.embed_scale
        if isinstance(scale, torch.Tensor):
            scale = scale.to(values)
        return values if scale is None else values * scale

    def _check(self, x: Tensor) -> Sequence[Tensor]:
        nothing = [torch.empty(0, dtype=torch.uint8)]
        if not x.numel():
            return nothing
        low, high = (int(n) for n in torch.aminmax(x))
        if low < 0 or high >= self.num_embeddings:
            raise SubsetError(
                f"Embedding: indices from {low} to {high}; there are {self.num_embeddings} "
                f"embeddings"
            )
        return nothing
