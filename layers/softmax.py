"""Softmax over a dimension that may be split: then workers exchange two numbers for each element of
the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from linop.backends.autograd.dtypes import torch_dtype
from linop.errors import ShapeError
from linop.layers.layer import Function, Layer, zero_volume_result
from linop.layers.moments import log_sum_exp, wide
from linop.spaces.decomposition import Axis
from linop.spaces.partition import Partition
from linop.spaces.tensor import TensorSpace


class Softmax(Layer):
    """Exponentials divided by their sum along a dimension, which may be split: then workers
    exchange the largest element of their block, and the sum of the exponentials beside it.

    Args:
        P_x: the partition of input and output; grid axis k splits dimension k.
        dim: as in torch.nn: the dimension; without one torch chooses, and warns.
        x_axes: roles of the grid axes, where they are others, as in `linop.TensorSpace`.

    Raises:
        ShapeError: from a call, the input has no such dimension; on every worker.
    """

    function = "softmax"
    """torch's function of the same values."""

    def __init__(
        self, P_x: Partition, dim: int | None = None, *, x_axes: Sequence[Axis] | None = None
    ) -> None:
        super().__init__([P_x], P_x)
        self.dim, self.x_axes = dim, x_axes

    def axes(self, number: int, ndim: int) -> Sequence[Axis]:
        if self.x_axes is None:
            return super().axes(number, ndim)
        return [k + ndim if isinstance(k, int) and k < 0 else k for k in self.x_axes]

    def bind(self, *inputs: TensorSpace) -> Function:
        (X,) = inputs
        dim = self.dim
        if dim is None:
            dim = torch.nn.functional._get_softmax_dim(self.function, X.ndim, 5)
        if not -X.ndim <= dim < X.ndim:
            raise ShapeError(
                f"{self._name}: dimension {dim} of an input of shape {X.global_shape}, which has "
                f"{X.ndim}"
            )
        d, dtype, result = dim % X.ndim, torch_dtype(wide(self, X)), torch_dtype(X.dtype)
        cut = d in X.axes and X.partition.shape[X.axes.index(d)] > 1
        normaliser = log_sum_exp(self, X, d) if cut else None
        if self.worker not in X.partition:
            return lambda x: zero_volume_result(X, x)
        if normaliser is None:
            function = getattr(torch.nn.functional, self.function)
            return lambda x: function(x, d)

        def normalise(x: Tensor) -> Tensor:
            x = self.signed(x.to(dtype))
            return self.finish(x - normaliser(x)).to(result)

        return normalise

    def signed(self, x: Tensor) -> Tensor:
        """The exponents."""
        return x

    def finish(self, logarithms: Tensor) -> Tensor:
        """The result, for the logarithms of the softmax."""
        return logarithms.exp()

    def extra_repr(self) -> str:
        return f"{self.inputs[0]}, dim={self.dim}"


class LogSoftmax(Softmax):
    __doc__ = Softmax.__doc__ and Softmax.__doc__.replace(
        "Exponentials divided by their sum", "Logarithms of exponentials divided by their sum"
    )
    function = "log_softmax"

    def finish(self, logarithms: Tensor) -> Tensor:
        return logarithms


class Softmin(Softmax):
    __doc__ = Softmax.__doc__ and Softmax.__doc__.replace(
        "Exponentials divided", "Exponentials of the negative elements divided"
    )
    function = "softmin"

    def signed(self, x: Tensor) -> Tensor:
        return -x


class Softmax2d(Softmax):
    """`Softmax` over the channels of images, as in torch.nn.

    Args:
        P_x: the partition of input and output: batch, channels, rows, columns.

    Raises:
        ShapeError: from a call, the input has no four dimensions; on every worker.
    """

    def __init__(self, P_x: Partition) -> None:
        super().__init__(P_x, 1)

    def bind(self, *inputs: TensorSpace) -> Function:
        if inputs[0].ndim != 4:
            raise ShapeError(
                f"{self._name}: an input of shape {inputs[0].global_shape}; 4 dimensions expected"
            )
        return super().bind(*inputs)
