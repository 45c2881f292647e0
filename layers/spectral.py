"""Distributed spectral convolution: the layer of a Fourier neural operator (Li et al., "Fourier
neural operator for parametric partial differential equations", 2021)."""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_lowercase
from typing import Any

import numpy as np
import torch
from torch import Tensor

from linop.backends.autograd.dtypes import torch_dtype
from linop.errors import ArgumentError, DTypeError, ShapeError
from linop.fourier.half_modes import half_modes
from linop.fourier.layouts import Way
from linop.fourier.spectral import low_modes
from linop.layers.layer import Function, Layer
from linop.layers.parameters.weights import drawn, hold
from linop.layers.sliding import spatial
from linop.layers.zero_volume import zero_volume_result
from linop.operators.collectives import repartition
from linop.spaces.decomposition import COPIES, Axis
from linop.spaces.partition import Partition
from linop.spaces.region import naturals
from linop.spaces.tensor import TensorSpace


class SpectralConv(Layer):
    """The lowest frequencies of (batch, channels, space), mixed over channels by a weight for each,
    and transformed back; zero for all others.

    Sequentially, on (batch, in_channels, n, m)::

        low = torch.fft.fftn(x, dim=(2, 3))[the lowest n_modes of both]
        y = torch.fft.ifftn(torch.einsum("bixy,ioxy->boxy", low, weight)[zeros for the others])

    and the real part of y if x is real. With `real`, half of the work and of the bytes: ``rfftn``
    and ``irfftn`` take the place of both, and the lowest n_modes of the last dimension are those
    from 0. The input is cut as `P_x` says, where `real` best has the last dimension whole; before
    anything is sent, it is shortened to the frequencies that count. Workers then multiply blocks of
    frequencies, of all channels, by their blocks of the weight.

    Args:
        P_x: the partition of input and output: batch, channels, space.
        in_channels, out_channels: numbers of channels.
        n_modes: number of frequencies of each dimension of space, in the order of a transform of
            that length: 0, 1, …, -2, -1. The layer has one parameter, `weight`, complex, of shape
            ``(in_channels, out_channels, *n_modes)``, drawn as in the paper's program.
        real: inputs are real, and of the last dimension, of length n, n_modes are the frequencies
            0, 1, …, at most n // 2 + 1 of them.
        device, dtype: of the weight; complex64 by default. Inputs are of this dtype, or of the real
            one of its precision.

    Raises:
        PartitionError: the grid has another number of axes. ArgumentError: the dtype is not
            complex, or n_modes of a `real` layer end with 0. ShapeError: from a call, the input has
            other channels, or a dimension is too short for its modes. DTypeError: from a call, the
            input has another dtype.

    Example:
        >>> P, x = linop.Partition((1, 1, 2)), torch.tensor([[[0.0, 2.0, 4.0, 6.0]]])
        >>> def main(backend):
        ...     mean = layers.SpectralConv(P, 1, 1, n_modes=(1,))  # frequency 0 alone
        ...     layers.initialize(mean, "weight", torch.nn.init.ones_)
        ...     return mean(x.chunk(2, dim=2)[backend.worker]).tolist()
        >>> linop.launch(main, workers=2)
        [[[[3.0, 3.0]]], [[[3.0, 3.0]]]]
    """

    floating = False
    weight: Tensor | None

    def __init__(
        self,
        P_x: Partition,
        in_channels: int,
        out_channels: int,
        n_modes: Sequence[int],
        device: Any = None,
        dtype: Any = None,
        *,
        real: bool = False,
    ) -> None:
        super().__init__([P_x], P_x)
        self.real = bool(real)
        self.n_modes = naturals(n_modes, "SpectralConv: n_modes", ArgumentError)
        spatial(self._name, P_x, len(self.n_modes))
        dtype = torch.complex64 if dtype is None else dtype
        if not dtype.is_complex:
            raise ArgumentError(f"SpectralConv: a weight of {dtype}; a complex dtype expected")
        self.in_channels, self.out_channels = in_channels, out_channels
        shape = in_channels, out_channels, *self.n_modes
        scale = 1 / max(in_channels * out_channels, 1)

        def make() -> Tensor:  # the numbers of scale * torch.rand(shape)
            empty = torch.empty(shape, device=device, dtype=dtype)
            torch.view_as_real(empty).uniform_(0, scale)
            return empty

        whole = drawn(self, make).requires_grad_()
        sizes = list(self.n_modes)
        if self.real:
            if not sizes[-1]:
                raise ArgumentError(
                    f"SpectralConv: n_modes {self.n_modes} of a real layer; a frequency of the "
                    f"last dimension expected"
                )
            sizes[-1] = max(2 * (sizes[-1] - 1), 1)
        smallest = TensorSpace((P_x.shape[0], in_channels, *sizes), P_x, np.float64)
        there, _ = self._transforms(smallest, np.dtype(complex), ("slab", "pencil"))
        needed = self._needed(there.codomain)
        one = tuple(slice(0, 1) if axis is COPIES else slice(None) for axis in needed.axes)
        hold(self, "weight", TensorSpace(shape, needed.partition[one], axes=needed.axes), whole)

    def _transforms(
        self, X: TensorSpace, dtype: np.dtype[Any], ways: Sequence[Way]
    ) -> tuple[Any, Any]:
        """The transform of an input to its lowest frequencies, and that of the result's back."""
        low = self.n_modes, tuple(range(2, 2 + len(self.n_modes))), (1,)
        spaces = [
            self._space(X, X.dtype if self.real else dtype, channels)
            for channels in (self.in_channels, self.out_channels)
        ]
        if self.real:
            first = half_modes(spaces[0], *low, ways)
            return first.forward, half_modes(spaces[1], *low, [first.way]).inverse
        route = ways[0] if len(ways) == 1 else "auto"
        there, back = (low_modes(space, *low, route=route) for space in spaces)
        return there, back.H

    def _needed(self, Z: TensorSpace) -> TensorSpace:
        """The blocks of the weight that workers need for their blocks of the frequencies."""
        axes: list[Axis] = [COPIES if axis == 0 else axis for axis in Z.axes]
        bounds = {d: Z.bounds[d] for d in range(2, Z.ndim) if d in axes}
        shape = self.in_channels, self.out_channels, *self.n_modes
        return TensorSpace(shape, Z.partition, Z.dtype, axes, bounds=bounds)

    def bind(self, *inputs: TensorSpace) -> Function:
        (X,) = inputs
        dtype = self.dtype_of("weight")
        if X.ndim != 2 + len(self.n_modes) or X.global_shape[1] != self.in_channels:
            raise ShapeError(
                f"{self._name}: an input of shape {X.global_shape}; (batch, {self.in_channels}, …) "
                f"of {2 + len(self.n_modes)} dimensions expected"
            )
        if np.result_type(X.dtype, np.complex64) != dtype or X.dtype.kind not in "fc":
            raise DTypeError(f"{self._name}: an input of {X.dtype} for a weight of {dtype}")
        if self.real and X.dtype.kind != "f":
            raise DTypeError(
                f"{self._name}: an input of {X.dtype}; a real one expected, as real=True"
            )
        there, back = self._transforms(X, dtype, ["slab"])
        Z, T, real = there.codomain, back.domain, X.dtype.kind == "f"
        kind = torch_dtype(X.dtype if self.real else dtype)
        held = self.spaces["weight"]
        held = TensorSpace(
            held.global_shape, held.partition, dtype, held.axes, bounds=dict(enumerate(held.bounds))
        )
        spread = self.moved(repartition, held, self._needed(Z))
        forward, inverse = self.applied(there), self.applied(back)
        space = ascii_lowercase[: len(self.n_modes)]
        products = f"XI{space},IO{space}->XO{space}"

        def convolve(x: Tensor | None) -> Tensor:
            weight = spread(self.weight)
            z = forward(x if x is None else x.to(kind))
            if self.worker in Z.partition:
                z = torch.einsum(products, z, weight)
            else:
                z = zero_volume_result(T, z, weight)
            y = inverse(z)
            return y.real if real and not self.real else y

        return convolve

    @staticmethod
    def _space(X: TensorSpace, dtype: np.dtype[Any], channels: int) -> TensorSpace:
        """The space of an input with numbers of another dtype, and with so many channels."""
        shape = X.global_shape[0], channels, *X.global_shape[2:]
        bounds = {d: X.bounds[d] for d in range(X.ndim) if d != 1}
        return TensorSpace(shape, X.partition, dtype, X.axes, X.name, bounds=bounds)

    def extra_repr(self) -> str:
        channels = f"{self.in_channels}, {self.out_channels}"
        real = ", real=True" * self.real
        return f"{self.inputs[0]}, {channels}, n_modes={self.n_modes}{real}"
