"""Gathering in one dtype, and summing gradients in another: the dtype of a reduction is that of its
operator, so G in half precision goes with the G.H of single precision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from linop.backends.autograd.bridge import Bridge
from linop.backends.autograd.dtypes import summed_dtype
from linop.errors import ArgumentError


class Converted:
    """A bridge whose arguments and results are converted, and its adjoint, which is another's.

    To `linop.backends.autograd.functions` it is a bridge; all that is not converted is the inner
    one's.

    Args:
        inner: the bridge.
        given: dtype of the arguments.
        made: dtype of the results.

    Attributes:
        adjoint: set by `paired`.
    """

    adjoint: Converted

    def __init__(self, inner: Bridge, given: Any, made: Any) -> None:
        self._inner, self.given, self.made = inner, given, made

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def start(self, tensors: Sequence[Any]) -> None:
        """Start what `finish` completes."""
        self._inner.start(self._into(tensors))

    def finish(self) -> tuple[Any, ...]:
        """The results of what was started."""
        return self._out_of(self._inner.finish())

    def run(self, tensors: Sequence[Any]) -> tuple[Any, ...]:
        """The results for these arguments."""
        return self._out_of(self._inner.run(self._into(tensors)))

    def zeros(self) -> list[Any]:
        """A zero argument, as tensors."""
        return [one.to(self.given) for one in self._inner.zeros()]

    def zero(self, k: int) -> Any:
        """A zero tensor of one of the regions held here."""
        return self._inner.zero(k).to(self.given)

    def _into(self, tensors: Sequence[Any]) -> list[Any]:
        return [tensor.detach().to(self._inner.dtype) for tensor in tensors]

    def _out_of(self, tensors: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(tensor.to(self.made) for tensor in tensors)


def paired(low: Bridge, high: Bridge, shards: Any, whole: Any) -> Converted:
    """The bridge that runs one operator, and as its adjoint that of the same operator in another
    dtype.

    Args:
        low: of G, in the dtype of messages of parameters.
        high: of G in the dtype of sums.
        shards, whole: dtypes of shards and of whole parameters.
    """
    high.order = high.adjoint.order = low.order
    forward, backward = Converted(low, shards, whole), Converted(high.adjoint, whole, shards)
    forward.adjoint, backward.adjoint = backward, forward
    return forward


def dtypes_of(shard: Any, param_dtype: Any, reduce_dtype: Any) -> tuple[Any, Any]:
    """Dtypes of whole parameters, and of sums of their gradients, for shards of a dtype."""
    if not shard.is_floating_point:
        return shard, shard
    return param_dtype or shard, reduce_dtype or summed_dtype(shard)


def dtype_checked(name: str, dtype: Any) -> None:
    """Check an argument that is a floating dtype of torch, or None.

    Raises:
        ArgumentError: it is another.
    """
    if dtype is not None and not getattr(dtype, "is_floating_point", False):
        raise ArgumentError(
            f"{name}: a floating dtype, such as torch.bfloat16, expected, given {dtype!r}"
        )


class Inputs:
    """Hook before a module's forward that converts its floating tensors to a dtype.

    Args:
        dtype: torch's.
    """

    def __init__(self, dtype: Any) -> None:
        self._dtype = dtype

    def __call__(self, module: Any, arguments: Any, options: Any) -> Any:
        del module
        return tree_map_only(torch.Tensor, self._converted, (arguments, options))

    def _converted(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self._dtype) if x.is_floating_point() else x
