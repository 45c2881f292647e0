"""Activations that are not of each element by itself: softmax, gates, and those with parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from linop.backends.autograd.dtypes import torch_dtype
from linop.errors import ShapeError
from linop.layers.layer import Function, Layer
from linop.layers.moments import log_softmax, wide
from linop.layers.norms.norm import Norm
from linop.layers.zero_volume import empty_block, zero_volume_result
from linop.normal_form.matching import Segment
from linop.operators.named_movement import collective
from linop.spaces.decomposition import COPIES, Axis
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

    Example:
        >>> P, whole = linop.Partition((1, 2)), torch.tensor([[0.0, 200.0, 0.0, 0.0]])
        >>> x = whole.chunk(2, dim=1)
        >>> parts = linop.launch(lambda b: layers.Softmax(P, dim=1)(x[b.worker]), workers=2)
        >>> [part.flatten().tolist() for part in parts]  # the largest of all is on worker 0
        [[0.0, 1.0], [0.0, 0.0]]
        >>> torch.nn.Softmax(dim=1)(whole).flatten().tolist()
        [0.0, 1.0, 0.0, 0.0]
    """

    function = "softmax"
    """torch's function of the same values."""

    def __init__(
        self, P_x: Partition, dim: int | None = None, *, x_axes: Sequence[Axis] | None = None
    ) -> None:
        super().__init__([P_x], P_x)
        self.dim, self.x_axes = dim, x_axes

    def bind(self, *inputs: TensorSpace) -> Function:
        (X,) = inputs
        dim = self.dim
        if dim is None:
            choose: Any = vars(torch.nn.functional)["_get_softmax_dim"]
            dim = int(choose(self.function, X.ndim, 5))
        if not -X.ndim <= dim < X.ndim:
            raise ShapeError(
                f"{self._name}: dimension {dim} of an input of shape {X.global_shape}, which has "
                f"{X.ndim}"
            )
        d, dtype, result = dim % X.ndim, torch_dtype(wide(self, X)), torch_dtype(X.dtype)
        cut = d in X.axes and X.partition.shape[X.axes.index(d)] > 1
        logarithms = log_softmax(self, X, d) if cut else None
        if self.worker not in X.partition:
            return lambda x: zero_volume_result(X, x)
        if logarithms is None:
            function = getattr(torch.nn.functional, self.function)
            return lambda x: function(x, d)

        def normalise(x: Tensor) -> Tensor:
            return self.finish(logarithms(self.signed(x.to(dtype)))).to(result)

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
    """Logarithms of exponentials divided by their sum along a dimension, which may be split: then
    workers exchange the largest element of their block, and the sum of the exponentials beside it.
    Arguments and errors as for `Softmax`.

    Example:
        >>> P, whole = linop.Partition((1, 2)), torch.tensor([[0.0, 200.0, 0.0, 100.0]])
        >>> x = whole.chunk(2, dim=1)
        >>> parts = linop.launch(lambda b: layers.LogSoftmax(P, dim=1)(x[b.worker]), workers=2)
        >>> [part.flatten().tolist() for part in parts]
        [[-200.0, 0.0], [-200.0, -100.0]]
        >>> torch.nn.LogSoftmax(dim=1)(whole).flatten().tolist()
        [-200.0, 0.0, -200.0, -100.0]
    """

    function = "log_softmax"

    def finish(self, logarithms: Tensor) -> Tensor:
        return logarithms


class Softmin(Softmax):
    """Exponentials of the negative elements divided by their sum along a dimension, which may be
    split: then workers exchange the smallest element of their block, and the sum of the
    exponentials beside it. Arguments and errors as for `Softmax`.

    Example:
        >>> P, whole = linop.Partition((1, 2)), torch.tensor([[0.0, -200.0, 0.0, 0.0]])
        >>> x = whole.chunk(2, dim=1)
        >>> parts = linop.launch(lambda b: layers.Softmin(P, dim=1)(x[b.worker]), workers=2)
        >>> [part.flatten().tolist() for part in parts]
        [[0.0, 1.0], [0.0, 0.0]]
        >>> torch.nn.Softmin(dim=1)(whole).flatten().tolist()
        [0.0, 1.0, 0.0, 0.0]
    """

    function = "softmin"

    def signed(self, x: Tensor) -> Tensor:
        return -x


class Softmax2d(Softmax):
    """`Softmax` over the channels of images, as in torch.nn.

    Args:
        P_x: the partition of input and output: batch, channels, rows, columns.

    Raises:
        ShapeError: from a call, the input has no four dimensions; on every worker.

    Example:
        >>> P, whole = linop.Partition((1, 2)), torch.tensor([0.0, 200.0]).view(1, 2, 1, 1)
        >>> x = whole.chunk(2, dim=1)
        >>> parts = linop.launch(lambda b: layers.Softmax2d(P)(x[b.worker]), workers=2)
        >>> [part.flatten().tolist() for part in parts]
        [[0.0], [1.0]]
        >>> torch.nn.Softmax2d()(whole).flatten().tolist()
        [0.0, 1.0]
    """

    def __init__(self, P_x: Partition) -> None:
        super().__init__(P_x, 1)

    def bind(self, *inputs: TensorSpace) -> Function:
        if inputs[0].ndim != 4:
            raise ShapeError(
                f"{self._name}: an input of shape {inputs[0].global_shape}; 4 dimensions expected"
            )
        return super().bind(*inputs)


class GLU(Layer):
    """The first half of a dimension times the sigmoid of the second, as in torch.nn. Where the
    dimension is split, its output is balanced, and both halves move.

    Args:
        P_x: the partition of input and output; grid axis k splits dimension k.
        dim: as in torch.nn.

    Raises:
        ShapeError: from a call, the input has no such dimension, or one of odd length; on every
            worker.

    Example:
        >>> P, whole = linop.Partition((1, 2)), torch.tensor([[2.0, 4.0, 0.0, 0.0]])
        >>> x = whole.chunk(2, dim=1)
        >>> parts = linop.launch(lambda b: layers.GLU(P)(x[b.worker]), workers=2)
        >>> [part.flatten().tolist() for part in parts]  # the gates, 1/2, come from worker 1
        [[1.0], [2.0]]
        >>> torch.nn.GLU()(whole).flatten().tolist()
        [1.0, 2.0]
    """

    def __init__(self, P_x: Partition, dim: int = -1) -> None:
        super().__init__([P_x], P_x)
        self.dim = dim

    def bind(self, *inputs: TensorSpace) -> Function:
        (X,) = inputs
        if not -X.ndim <= self.dim < X.ndim or X.global_shape[self.dim] % 2:
            raise ShapeError(
                f"{self._name}: dimension {self.dim} of an input of shape {X.global_shape}; one of "
                f"even length expected"
            )
        d = self.dim % X.ndim
        if len(X.bounds[d]) == 1:
            if self.worker not in X.partition:
                return lambda x: zero_volume_result(X, x)
            return lambda x: torch.nn.functional.glu(x, d)
        half = X.global_shape[d] // 2
        shape = [half if e == d else n for e, n in enumerate(X.global_shape)]
        kept = {e: X.bounds[e] for e in range(X.ndim) if e != d}
        Y = TensorSpace(shape, X.partition, X.dtype, X.axes, bounds=kept)
        first, second = (
            self.moved(collective, "P", "", X, Y, segments={d: (Segment(0, at, half),)}, of=0)
            for at in (0, half)
        )
        return lambda x: first(x) * second(x).sigmoid()

    def extra_repr(self) -> str:
        return f"{self.inputs[0]}, dim={self.dim}"


class PReLU(Norm):
    """Negative elements times a parameter, or one for each channel, as in torch.nn. The parameters
    of channels are split along the channel axis of `P_x`; they are held at coordinate 0 of its
    other axes, and gradients are sums over all elements.

    Args:
        P_x: the partition of input and output; grid axis k splits dimension k.
        num_parameters, init, device, dtype: as in torch.nn.

    Raises:
        ShapeError: from a call, the input has another number of channels; on every worker.

    Example:
        >>> P, whole = linop.Partition((2,)), torch.tensor([-4.0, 4.0, -8.0, 8.0])
        >>> x = whole.chunk(2, dim=0)
        >>> parts = linop.launch(lambda b: layers.PReLU(P)(x[b.worker]), workers=2)
        >>> [part.flatten().tolist() for part in parts]
        [[-1.0, 4.0], [-2.0, 8.0]]
        >>> torch.nn.PReLU()(whole).flatten().tolist()
        [-1.0, 4.0, -2.0, 8.0]
    """

    def __init__(
        self,
        P_x: Partition,
        num_parameters: int = 1,
        init: float = 0.25,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__([P_x], P_x)
        self.num_parameters, self.init = num_parameters, init
        whole = torch.nn.PReLU(num_parameters, init, device, dtype)
        of_channels = num_parameters > 1
        axes = [0 if k == 1 and of_channels else COPIES for k in range(P_x.ndim)]
        self._hold_affine(whole, axes, False)

    def bind(self, *inputs: TensorSpace) -> Function:
        (X,) = inputs
        n = self.num_parameters
        if n > 1 and (X.ndim < 2 or X.global_shape[1] != n):
            raise ShapeError(
                f"{self._name}: an input of shape {X.global_shape}; (batch, {n}, …) expected"
            )
        parameters = self._affine(X, 1, int(n > 1))
        if self.worker not in X.partition:
            return lambda x: zero_volume_result(X, x)

        def activate(x: Tensor) -> Tensor:
            weight, _ = parameters()
            assert weight is not None
            if not x.numel():
                return empty_block(x.shape, x, weight)
            return torch.nn.functional.prelu(x, weight.to(x.dtype))

        return activate

    def extra_repr(self) -> str:
        return f"{self.inputs[0]}, num_parameters={self.num_parameters}"
