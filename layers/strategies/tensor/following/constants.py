"""Whole tensors that are constant along some dimensions, as those of zeros: a program makes them
as long as its own block, and the result is right."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from linop.strategies.tensor.following.function_call import FunctionCall

_FILLED = frozenset(
    "zeros ones full new_zeros new_ones new_full zeros_like ones_like full_like".split()
)


class Constants:
    """Dimensions, from the last, along which tensors of a call are constant."""

    def __init__(self) -> None:
        self._dims: Any = WeakTensorKeyDictionary()

    def __contains__(self, x: Any) -> bool:
        return x in self._dims

    def along(self, x: Any, dim: int) -> bool:
        """True if a tensor is constant along a dimension, from the last."""
        return dim in self._dims.get(x, ())

    def follow(self, call: FunctionCall, by_elements: bool) -> None:
        """Note the result of a function of whole tensors.

        Args:
            by_elements: it is computed element by element.
        """
        x = call.result
        if not isinstance(x, torch.Tensor):
            return
        every = range(-x.ndim, 0)
        if call.name in _FILLED:
            self._dims[x] = frozenset(every)
        elif not any(y in self._dims for y in call.tensors):
            return
        elif by_elements:
            self._dims[x] = frozenset(
                d
                for d in every
                if all(y.ndim < -d or y.shape[d] == 1 or self.along(y, d) for y in call.tensors)
            )
        elif call.name == "__getitem__" and _slices(call.given(1), call.tensors[0].ndim):
            self._dims[x] = self._dims[call.tensors[0]]


def _slices(index: Any, ndim: int) -> bool:
    items = index if isinstance(index, tuple) else (index,)
    return all(isinstance(i, slice) for i in items) and len(items) <= ndim
