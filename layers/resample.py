"""Distributed up- and down-sampling: each worker gets the range of the input that its block of the
balanced output needs, and resamples it locally, one dimension at a time."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linop.backends.autograd.dtypes import torch_dtype
from linop.errors import ArgumentError, DTypeError, ShapeError
from linop.layers.layer import Function, Layer
from linop.layers.sliding import Window, check_dimensions, numbers, spatial
from linop.operators.named_movement import collective
from linop.spaces.decomposition import Bounds
from linop.spaces.partition import Partition
from linop.spaces.tensor import TensorSpace

_MODES = {
    "nearest": (1, 2, 3),
    "nearest-exact": (1, 2, 3),
    "linear": (1,),
    "bilinear": (2,),
    "trilinear": (3,),
    "bicubic": (2,),
}
"""Interpolation modes, and the numbers of dimensions of space for which torch has them."""


class Tap(NamedTuple):
    """One term of the weighted sum that each output along a dimension is: for all outputs, the
    index of an input (int64), and its weight. None: all weights are 1."""

    indices: Tensor
    weight: Tensor | None


class Upsample(Layer):
    """Interpolation over blocks of (batch, channels, space), as `torch.nn.Upsample`. The output is
    balanced in space, and cut as the input in batch and channels.

    Args:
        P_x: the partition of input and output: batch, channels, and 1 to 3 dimensions of space.
        size, scale_factor, mode, align_corners, recompute_scale_factor: as in torch.nn.

    Raises:
        PartitionError: `P_x` has no axes of space, or more than 3. ArgumentError: no such mode with
            so many dimensions, or inconsistent arguments.

    Example:
        >>> P, whole = linop.Partition((1, 1, 2)), torch.arange(3.0).view(1, 1, 3)
        >>> x = whole.chunk(2, dim=2)
        >>> parts = linop.launch(
        ...     lambda b: layers.Upsample(P, scale_factor=2)(x[b.worker]), workers=2
        ... )
        >>> [part.flatten().tolist() for part in parts]
        [[0.0, 0.0, 1.0], [1.0, 2.0, 2.0]]
        >>> torch.nn.Upsample(scale_factor=2)(whole).flatten().tolist()
        [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
    """

    def __init__(
        self,
        P_x: Partition,
        size: int | Sequence[int] | None = None,
        scale_factor: float | Sequence[float] | None = None,
        mode: str = "nearest",
        align_corners: bool | None = None,
        recompute_scale_factor: bool | None = None,
    ) -> None:
        super().__init__([P_x], P_x)
        self.ndim = P_x.ndim - 2
        spatial(self._name, P_x, min(max(self.ndim, 1), 3))
        self.size, self.scale_factor, self.mode = size, scale_factor, mode
        self.align_corners = align_corners
        self.recompute_scale_factor = recompute_scale_factor
        known = [name for name, dims in _MODES.items() if self.ndim in dims]
        if mode not in known:
            raise ArgumentError(
                f"{self._name}: mode {mode!r} in {self.ndim} dimensions of space; there are "
                f"{', '.join(known)}"
            )
        with suppress(ShapeError):  # 64 may be a shape that does not fit: a call checks its own
            self._interpolated(torch.empty((1, 1, *[64] * self.ndim), device="meta"))

    def _interpolated(self, x: Tensor) -> Tensor:
        """torch's result of a meta tensor, for its shape.

        Raises:
            ShapeError, ArgumentError: torch refuses the shape, or the arguments.
        """
        try:
            return torch.nn.functional.interpolate(
                x,
                self.size,
                self.scale_factor,
                self.mode,
                self.align_corners,
                self.recompute_scale_factor,
            )
        except (ValueError, TypeError, RuntimeError) as error:
            kind = ShapeError if isinstance(error, RuntimeError) else ArgumentError
            raise kind(f"{self._name}: {str(error).splitlines()[0]}") from None

    def bind(self, *inputs: TensorSpace) -> Function:
        (X,) = inputs
        check_dimensions(self._name, X, self.ndim)
        dtype = torch_dtype(X.dtype)
        if not dtype.is_floating_point:
            raise DTypeError(f"{self._name}: an input of {dtype}; a floating-point one expected")
        extents = X.global_shape[2:]
        shape = self._interpolated(torch.empty((1, 1, *extents), device="meta")).shape
        Y = TensorSpace((*X.global_shape[:2], *shape[2:]), X.partition)
        # torch's own precision of coordinates and weights.
        wide = dtype if dtype is torch.float64 else torch.float32
        taps = [
            interpolation(
                self.mode, bool(self.align_corners), d, n, shape[2:], self._scale(d), wide
            )
            for d, n in enumerate(extents)
        ]
        bounds = dict(enumerate(X.bounds))
        for d, one in enumerate(taps, start=2):
            bounds[d] = tuple(needed_inputs(one, a, b) for a, b in Y.bounds[d])
        needed = TensorSpace(X.global_shape, X.partition, X.dtype, X.axes, bounds=bounds)
        arrive = self.moved(collective, "H", "", X, needed)
        if self.worker not in X.partition:
            return arrive
        outputs, here = Y.slices(self.worker), needed.slices(self.worker)
        mine = []
        for d, one in enumerate(taps, start=2):
            out, start = outputs[d], here[d].start
            mine.append([Tap(i[out] - start, None if w is None else w[out]) for i, w in one])

        def upsample(x: Tensor) -> Tensor:
            x = arrive(x)
            # The last dimension first, as torch does.
            for d in reversed(range(len(mine))):
                x = combined(x, d + 2, mine[d])
            return x.to(dtype)

        return upsample

    def _scale(self, d: int) -> float | None:
        """Scale factor that torch computes coordinates with; None where it uses the ratio of the
        extents."""
        if self.scale_factor is None or self.recompute_scale_factor:
            return None
        factors = self.scale_factor
        return float(factors[d] if isinstance(factors, Sequence) else factors)

    def extra_repr(self) -> str:
        what = f"size={self.size}" if self.size is not None else f"scale_factor={self.scale_factor}"
        return f"{self.inputs[0]}, {what}, mode={self.mode!r}"


def interpolation(
    mode: str, align: bool, j: int, n: int, shape: Sequence[int], factor: float | None, dtype: Any
) -> list[Tap]:
    """Terms of the outputs along a dimension of space, as in ATen's UpSample.h.

    Args:
        mode, align: as in torch.
        j: the dimension.
        n: its extent in the input.
        shape: of the output, in space.
        factor: the scale that torch computes coordinates with; None for the ratio of the extents.
        dtype: of coordinates and weights.
    """
    if mode.startswith("nearest"):
        return [Tap(_nearest(mode, j, n, shape, factor, dtype), None)]
    m = shape[j]
    at, cubic = torch.arange(m, dtype=dtype), mode == "bicubic"
    if m == n and not cubic:  # torch copies, whatever the factor
        return [Tap(at.long(), None)]
    if align:
        at = at * ((n - 1) / (m - 1) if m > 1 else 0)
    else:
        ratio = torch.tensor(n / m if factor is None else 1 / factor, dtype=dtype)
        at = ratio * (at + 0.5) - 0.5
        at = at if cubic else at.clamp(min=0)
    first = at.floor().clamp(max=n - 1)
    t = (at - first).clamp(0, 1)
    weights, before = (cubic_weights(t), 1) if cubic else ([1 - t, t], 0)
    return [
        Tap((first.long() + k - before).clamp(0, n - 1), weight) for k, weight in enumerate(weights)
    ]


_SMALL_IMAGE = 128
"""Rows and columns together up to which torch rounds indices of images in float32."""


def _nearest(
    mode: str, d: int, n: int, shape: Sequence[int], factor: float | None, dtype: Any
) -> Tensor:
    """For each output along dimension d, of extent n, the index of its input: by torch's own
    rounding, which depends on the dtype, the number of dimensions and the size of the outputs.

    Args:
        shape: of the outputs, in space.
        factor: that torch computes coordinates with; None for the ratio of the extents.
    """
    ndim, outputs = len(shape), shape[d]
    other = _SMALL_IMAGE if ndim == 2 and sum(shape) > _SMALL_IMAGE else 1
    given = [(outputs if factor is None else factor) if k == d else other for k in range(ndim)]
    indices = torch.arange(n, dtype=dtype).reshape([n if k == d else 1 for k in range(-2, ndim)])
    about: dict[str, Any] = {"size" if factor is None else "scale_factor": given}
    found = torch.nn.functional.interpolate(indices, **about, mode=mode).movedim(2 + d, 0)
    return found.reshape(outputs, -1)[:, 0].long()


def cubic_weights(t: Tensor) -> list[Tensor]:
    """Weights of the four nearest inputs, the second of them at distance t in [0, 1] (Keys 1981,
    "Cubic convolution interpolation", a = -0.75)."""
    a = -0.75

    def near(x: Tensor) -> Tensor:
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def far(x: Tensor) -> Tensor:
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    return [far(t + 1), near(t), near(1 - t), far(2 - t)]


def needed_inputs(taps: Sequence[Tap], first: int, last: int) -> tuple[int, int]:
    """Index range of the inputs that outputs first:last need; (0, 0) if there are none."""
    if first == last:
        return 0, 0
    indices = torch.stack([tap.indices[first:last] for tap in taps])
    return int(indices.min()), int(indices.max()) + 1


def combined(x: Tensor, d: int, taps: Sequence[Tap]) -> Tensor:
    """Sums of an input's elements along a dimension, each times its weight."""
    total: Tensor | None = None
    for indices, weight in taps:
        part = x.index_select(d, indices)
        if weight is not None:
            part = part * weight.reshape(-1, *[1] * (x.ndim - 1 - d))
        total = part if total is None else total + part
    assert total is not None
    return total


class UpsamplingNearest2d(Upsample):
    """`Upsample` to the nearest element, as in torch.nn.

    Args:
        P_x: the partition of input and output: batch, channels, height, width.
        size, scale_factor: as in torch.nn.

    Example:
        >>> P, whole = linop.Partition((1, 1, 2, 1)), torch.arange(3.0).view(1, 1, 3, 1)
        >>> x = whole.chunk(2, dim=2)
        >>> parts = linop.launch(
        ...     lambda b: layers.UpsamplingNearest2d(P, (6, 1))(x[b.worker]), workers=2
        ... )
        >>> [part.flatten().tolist() for part in parts]
        [[0.0, 0.0, 1.0], [1.0, 2.0, 2.0]]
        >>> torch.nn.UpsamplingNearest2d((6, 1))(whole).flatten().tolist()
        [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
    """

    def __init__(self, P_x: Partition, size: Any = None, scale_factor: Any = None) -> None:
        spatial("UpsamplingNearest2d", P_x, 2)
        super().__init__(P_x, size, scale_factor)


class UpsamplingBilinear2d(Upsample):
    """Bilinear `Upsample` with aligned corners, as in torch.nn.

    Args:
        P_x: the partition of input and output: batch, channels, height, width.
        size, scale_factor: as in torch.nn.

    Example:
        >>> P, whole = linop.Partition((1, 1, 2, 1)), torch.arange(3.0).view(1, 1, 3, 1)
        >>> x = whole.chunk(2, dim=2)
        >>> parts = linop.launch(
        ...     lambda b: layers.UpsamplingBilinear2d(P, (5, 1))(x[b.worker]), workers=2
        ... )
        >>> [part.flatten().tolist() for part in parts]
        [[0.0, 0.5, 1.0], [1.5, 2.0]]
        >>> torch.nn.UpsamplingBilinear2d((5, 1))(whole).flatten().tolist()
        [0.0, 0.5, 1.0, 1.5, 2.0]
    """

    def __init__(self, P_x: Partition, size: Any = None, scale_factor: Any = None) -> None:
        spatial("UpsamplingBilinear2d", P_x, 2)
        super().__init__(P_x, size, scale_factor, "bilinear", True)


class Downsample(Layer):
    """Every stride-th element in space: ``x[..., ::s1, ::s2]``, in balanced blocks. The geometry is
    that of a sliding kernel of one element.

    Args:
        P_x: the partition of input and output: batch, channels, space.
        stride: one number, or one for each dimension of space.

    Example:
        >>> P, whole = linop.Partition((1, 1, 2)), torch.arange(6.0).view(1, 1, 6)
        >>> x = whole.chunk(2, dim=2)
        >>> parts = linop.launch(lambda b: layers.Downsample(P, 2)(x[b.worker]), workers=2)
        >>> [part.flatten().tolist() for part in parts]
        [[0.0, 2.0], [4.0]]
        >>> whole[..., ::2].flatten().tolist()
        [0.0, 2.0, 4.0]
    """

    def __init__(self, P_x: Partition, stride: int | Sequence[int]) -> None:
        super().__init__([P_x], P_x)
        ndim = max(P_x.ndim - 2, 1)
        self.grid = spatial(self._name, P_x, ndim)
        self.stride = numbers(self._name, "stride", stride, ndim, 1)

    def bind(self, *inputs: TensorSpace) -> Function:
        (X,) = inputs
        ndim = len(self.stride)
        check_dimensions(self._name, X, ndim)
        window = Window((1,) * ndim, self.stride, ((0, 0),) * ndim, (1,) * ndim)
        bounds: dict[int, Bounds] = dict(enumerate(X.bounds))
        bounds.update(enumerate(window.needed(X.global_shape[2:], self.grid), start=2))
        needed = TensorSpace(X.global_shape, X.partition, X.dtype, X.axes, bounds=bounds)
        arrive = self.moved(collective, "H", "", X, needed)
        if self.worker not in X.partition:
            return arrive
        steps: tuple[Any, ...] = (..., *[slice(None, None, s) for s in self.stride])
        return lambda x: arrive(x)[steps].clone(memory_format=torch.contiguous_format)

    def extra_repr(self) -> str:
        return f"{self.inputs[0]}, stride={self.stride}"
