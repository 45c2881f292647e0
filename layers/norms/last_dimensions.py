"""Normalisations over the last dimensions, on any partition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from linop.backends.autograd.dtypes import torch_dtype
from linop.errors import ShapeError
from linop.layers.layer import Function
from linop.layers.linear import dense_axes
from linop.layers.moments import Moments, Sums, wide
from linop.layers.norms.norm import Norm, scaled
from linop.spaces.decomposition import COPIES, Axis
from linop.spaces.partition import Partition
from linop.spaces.tensor import TensorSpace


class _LastNorm(Norm):
    """Base class of normalisations over the last dimensions.

    Args:
        whole: the sequential layer.
    """

    def __init__(
        self, P_x: Partition, whole: Any, bias: bool, x_axes: Sequence[Axis] | None
    ) -> None:
        super().__init__([P_x], P_x)
        self.eps, self.elementwise_affine, self.x_axes = whole.eps, whole.elementwise_affine, x_axes
        self.normalized_shape: tuple[int, ...] = whole.normalized_shape
        dims = len(self.normalized_shape)
        # Parameters are laid out for an input with as many dimensions as the grid has axes; for
        # any other they are repartitioned at a call.
        known = [axis for axis in x_axes or () if isinstance(axis, int)]
        ndim = max(P_x.ndim, dims, *(1 + axis for axis in known), *(-axis for axis in known))
        split = [
            axis % ndim - (ndim - dims) if isinstance(axis, int) else -1
            for axis in dense_axes(self._name, P_x, ndim, x_axes)
        ]
        self._hold_affine(whole, [d if d >= 0 else COPIES for d in split], bias)

    def axes(self, number: int, ndim: int) -> Sequence[Axis]:
        return dense_axes(self._name, self.inputs[0], ndim, self.x_axes)

    def bind(self, *inputs: TensorSpace) -> Function:
        (X,) = inputs
        dims = len(self.normalized_shape)
        first = X.ndim - dims
        if X.global_shape[max(first, 0) :] != self.normalized_shape:
            raise ShapeError(
                f"{self._name}: an input of shape {X.global_shape}; (…, "
                f"{', '.join(map(str, self.normalized_shape))}) expected"
            )
        scale = self.normaliser(X, range(first, X.ndim))
        parameters = self._affine(X, first, dims)
        return self._on_blocks(X, lambda x: scaled(scale(x), *parameters()))

    def normaliser(self, X: TensorSpace, dims: Sequence[int]) -> Function:
        """Function from a block of X to the block that is normalised over some dimensions."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return (
            f"{self.inputs[0]}, {self.normalized_shape}, eps={self.eps}, "
            f"elementwise_affine={self.elementwise_affine}, bias={'bias' in self.spaces}"
        )


class LayerNorm(_LastNorm):
    """Normalisation over the last dimensions, which may be split: then sums over them are two
    all-reduces among the workers that share them.

    Weight and bias are split as the last dimensions are, and held at coordinate 0 of the other grid
    axes.

    Args:
        P_x: the partition of input and output. A grid of two axes splits the first and the last
            dimension, as for `Linear`; any other, axis k dimension k.
        normalized_shape, eps, elementwise_affine, bias, device, dtype: as in torch.nn.
        x_axes: roles of the grid axes, where they are others, as in `linop.TensorSpace`.

    Raises:
        ShapeError: from a call, the input has other last dimensions; on every worker.

    Example:
        >>> P, whole = linop.Partition((1, 2)), torch.tensor([[0.0, 0.0, 2.0, 2.0]])
        >>> x = whole.chunk(2, dim=1)
        >>> parts = linop.launch(lambda b: layers.LayerNorm(P, 4)(x[b.worker]), workers=2)
        >>> [part.round().flatten().tolist() for part in parts]
        [[-1.0, -1.0], [1.0, 1.0]]
        >>> torch.nn.LayerNorm(4)(whole).round().flatten().tolist()
        [-1.0, -1.0, 1.0, 1.0]
    """

    def __init__(
        self,
        P_x: Partition,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        x_axes: Sequence[Axis] | None = None,
    ) -> None:
        whole = torch.nn.LayerNorm(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        super().__init__(P_x, whole, bias, x_axes)

    def normaliser(self, X: TensorSpace, dims: Sequence[int]) -> Function:
        moments = Moments(self, X, dims)

        def normalise(x: Tensor) -> Tensor:
            _, centered, variance = moments(x)
            result: Tensor = centered * (variance + self.eps).rsqrt()
            return result

        return normalise


class RMSNorm(_LastNorm):
    """Division by the root of the mean square over the last dimensions, which may be split: then
    the sum over them is an all-reduce among the workers that share them.

    The weight is split as the last dimensions are, and held at coordinate 0 of the other grid axes.

    Args:
        P_x: the partition of input and output. A grid of two axes splits the first and the last
            dimension, as for `Linear`; any other, axis k dimension k.
        normalized_shape, eps, elementwise_affine, device, dtype: as in torch.nn.
        x_axes: roles of the grid axes, where they are others, as in `linop.TensorSpace`.

    Raises:
        ShapeError: from a call, the input has other last dimensions; on every worker.

    Example:
        >>> P, whole = linop.Partition((1, 2)), torch.tensor([[2.0, 2.0, -2.0, 2.0]])
        >>> x = whole.chunk(2, dim=1)
        >>> parts = linop.launch(lambda b: layers.RMSNorm(P, 4)(x[b.worker]), workers=2)
        >>> [part.round().flatten().tolist() for part in parts]
        [[1.0, 1.0], [-1.0, 1.0]]
        >>> torch.nn.RMSNorm(4)(whole).round().flatten().tolist()
        [1.0, 1.0, -1.0, 1.0]
    """

    def __init__(
        self,
        P_x: Partition,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        x_axes: Sequence[Axis] | None = None,
    ) -> None:
        shape: Any = normalized_shape
        whole = torch.nn.RMSNorm(shape, eps, elementwise_affine, device, dtype)
        super().__init__(P_x, whole, False, x_axes)

    def normaliser(self, X: TensorSpace, dims: Sequence[int]) -> Function:
        sums = Sums(self, X, dims)
        # torch's default is that of the dtype in which it computes.
        eps = torch.finfo(torch_dtype(wide(self, X))).eps if self.eps is None else self.eps
        return lambda x: x * (sums(x.square()) / max(sums.count, 1) + eps).rsqrt()
