"""Dropout with a mask that does not depend on the partition.

An element of the mask is a function of one seed and of the element's index in the global tensor:
the index-th output of the generator SplitMix64 started at the seed (Steele, Lea & Flood 2014, "Fast
splittable pseudorandom number generators", figure 16 with the finaliser of Vigna's splitmix64.c).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

from linop.backends.autograd.bridge import bridge_of
from linop.backends.autograd.real_calls import really
from linop.backends.autograd.recompute import run
from linop.errors import ArgumentError, DTypeError, ShapeError
from linop.layers.layer import Function, Layer
from linop.layers.parameters.weights import first_of_process
from linop.layers.zero_volume import zero_volume_result
from linop.operators.collectives import repartition
from linop.spaces.decomposition import COPIES, Axis
from linop.spaces.partition import Partition
from linop.spaces.tensor import TensorSpace

_GAMMA = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
BITS = 53
"""Bits of a random number; a float64 holds them exactly."""


class Dropout(Layer):
    """Zeros with probability `p` when training, and the other elements divided by 1 - p.

    The mask depends on torch's generator of worker 0 alone: after the same `torch.manual_seed` it
    is the same on any partition, and on one worker. At every call in training mode each process
    draws one number, so that generators in the same state stay so; the threads of one process draw
    one together.

    Args:
        P_x: the partition of input and output; grid axis k splits dimension k.
        p: the probability.
        inplace: write the result into the input.
        x_axes: roles of the grid axes, where they are others, as in `linop.TensorSpace`.

    Raises:
        ArgumentError: p is no probability.

    Example:
        >>> x = torch.ones(6)
        >>> def main(backend):
        ...     torch.manual_seed(0)
        ...     P = linop.Partition((backend.workers,))
        ...     return layers.Dropout(P, p=0.5)(x.chunk(backend.workers)[backend.worker])
        >>> one, two = (torch.cat(linop.launch(main, workers=n)) for n in (1, 2))
        >>> torch.equal(one, two), set(one.tolist()) <= {0.0, 2.0}
        (True, True)
    """

    dims: int | None = None
    """Number of leading dimensions along which the mask varies; it is constant along the others.
    None: it varies along all."""
    ndim: int | None = None
    """Number of dimensions of the input; None: any."""

    def __init__(
        self,
        P_x: Partition,
        p: float = 0.5,
        inplace: bool = False,
        *,
        x_axes: Sequence[Axis] | None = None,
    ) -> None:
        super().__init__([P_x], P_x)
        if not 0 <= p <= 1:
            raise ArgumentError(f"{self._name}: p={p!r}; a probability, from 0 to 1, expected")
        self.p, self.inplace, self.x_axes = p, inplace, x_axes
        self._draws = first_of_process(self)
        here = TensorSpace((1,), Partition((1,), [0]), np.int64, name="seed")
        everywhere = here.like(Partition((len(P_x.workers),), P_x.workers), [COPIES])
        self._send = repartition(here, everywhere)
        bridge_of(self._send, self.backend)  # compiled now, by all

    def bind(self, *inputs: TensorSpace) -> Function:
        (X,) = inputs
        if self.ndim not in (None, X.ndim):
            raise ShapeError(
                f"{self._name}: an input of shape {X.global_shape}; {self.ndim} dimensions expected"
            )
        if X.dtype.kind in "iu":
            raise DTypeError(f"{self._name}: an input of {X.dtype}; no whole numbers expected")
        inside = self.worker in X.partition
        where = X.slices(self.worker) if inside else ()

        def dropped(x: Tensor) -> Tensor:
            seed = self.drawn_seed() if self.training and self.p else None
            if not inside:
                return zero_volume_result(X, x)
            if seed is None:
                return x
            kept = random_bits(seed, X.global_shape, where, self.dims) >= int(self.p * 2**BITS)
            factor = kept.to(x.dtype).mul_(1 / (1 - self.p) if self.p < 1 else 0)
            return x.mul_(factor) if self.inplace else x * factor

        return dropped

    def drawn_seed(self) -> Tensor:
        """Seed that worker 0 draws: an int64 on all workers of the input, no number on others.
        Collective."""
        there = self.worker in self.inputs[0]
        (seed,) = really(self, self._seed, [((1,) if there else (0,), torch.int64)])
        return seed

    def _seed(self) -> Sequence[Tensor]:
        # All workers have agreed on this call, so none of them seeds the generator meanwhile.
        drawn = torch.empty(1, dtype=torch.int64)
        if self._draws:
            drawn.random_()
        return run(bridge_of(self._send, self.backend), [drawn if self.worker == 0 else None])

    def extra_repr(self) -> str:
        return f"{self.inputs[0]}, p={self.p}, inplace={self.inplace}"


def random_bits(
    seed: Tensor, shape: Sequence[int], where: Sequence[slice | Tensor], dims: int | None = None
) -> Tensor:
    """Random numbers of 53 bits (int64) for the elements of a block, by index in the global tensor.

    Args:
        seed: an int64.
        shape: of the global tensor.
        where: slices of the block, or the indices along a dimension (int64).
        dims: number of leading dimensions that the index covers; the result has extent 1 in the
            others. None: all.
    """
    dims = len(shape) if dims is None else dims
    index = torch.ones((), dtype=torch.int64, device=seed.device)
    for d, part in enumerate(where):
        if isinstance(part, slice):
            part = torch.arange(part.start, part.stop, device=seed.device)
        numbers = part * prod(shape[d + 1 : dims])
        index = index[..., None] + (numbers if d < dims else 0)
    z = index.mul_(_signed(_GAMMA)).add_(seed.view(()))
    for shift, factor in _MIX:
        z = (z ^ _shifted(z, shift)).mul_(_signed(factor))
    return _shifted(z, 64 - BITS)


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Logical right shift of an int64 (torch's is arithmetic)."""
    return (z >> bits).bitwise_and_((1 << 64 - bits) - 1)


def _signed(n: int) -> int:
    return n - 2**64 if n >= 2**63 else n


class _Channels(Dropout):
    """Dropout of whole channels: all elements of a channel of a sample are zeroed, or none.

    Args:
        P_x: the partition of input and output: batch, channels, space.
        p, inplace: as in torch.nn.

    Raises:
        ShapeError: from a call, the input has another number of dimensions; on every worker.
    """

    dims = 2


class Dropout1d(_Channels):
    """
    Example:
        >>> P, x = linop.Partition((1, 1, 2)), torch.ones(1, 8, 6).chunk(2, dim=2)
        >>> one, other = linop.launch(lambda b: layers.Dropout1d(P)(x[b.worker]), workers=2)
        >>> torch.equal(one, other)  # both workers have zeros in the same channels
        True
    """

    ndim = 3


class Dropout2d(_Channels):
    """
    Example:
        >>> P, x = linop.Partition((1, 1, 2)), torch.ones(1, 8, 6, 2).chunk(2, dim=2)
        >>> one, other = linop.launch(lambda b: layers.Dropout2d(P)(x[b.worker]), workers=2)
        >>> torch.equal(one, other)  # both workers have zeros in the same channels
        True
    """

    ndim = 4


class Dropout3d(_Channels):
    """
    Example:
        >>> P, x = linop.Partition((1, 1, 2)), torch.ones(1, 8, 6, 2, 2).chunk(2, dim=2)
        >>> one, other = linop.launch(lambda b: layers.Dropout3d(P)(x[b.worker]), workers=2)
        >>> torch.equal(one, other)  # both workers have zeros in the same channels
        True
    """

    ndim = 5
