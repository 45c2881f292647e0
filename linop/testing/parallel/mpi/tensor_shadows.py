"""Shadows of torch's tensors and NumPy's arrays together, for functions that go from the ones to
the others, and what of torch makes arrays of tensors, and tensors of arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch

from linop.testing.parallel.mpi.array_shadows import ArrayShadows
from linop.testing.parallel.mpi.arrays import active, plain, tracked, tracking
from linop.testing.parallel.mpi.buffers import address_of
from linop.testing.parallel.recording.shadows import Shadows

_PLAIN_NUMPY = torch.Tensor.numpy


class TensorShadows(ArrayShadows, Shadows):
    """Shadows of tensors and of NumPy's arrays."""

    def __init__(self, call: int, backward: bool, given: Sequence[torch.Tensor | None]) -> None:
        self._ends: dict[int, tuple[int, int]] = {}
        Shadows.__init__(self, call, backward, given)
        self.lifted.values = [_values(one) for one in given]
        self._given = [(one, None if one is None else one._version) for one in given]

    def finish(self, made: Sequence[torch.Tensor | None]) -> Any:
        lifted = super().finish(made)
        for k, ((one, version), before) in enumerate(zip(self._given, lifted.values, strict=True)):
            same = one is None or one._version != version or np.array_equal(before, _values(one))
            if not same:
                lifted.overwritten.append(k)
        lifted.results = [_values(one) for one in made]
        return lifted

    def _zeros(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int64)

    def _array(self, store: torch.Tensor) -> np.ndarray:
        found: np.ndarray = _PLAIN_NUMPY(store)
        return found

    def _view(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if tensor.numel() == 0:
            return None
        found = self._found(tensor.data_ptr(), tensor.element_size())
        if found is None:
            return None
        return torch.as_strided(found[0], tensor.shape, tensor.stride(), found[1])

    def _made(self, tensor: torch.Tensor) -> torch.Tensor:
        known = self._view(tensor)
        if known is not None:
            return known
        storage = tensor.untyped_storage()
        self._begin(storage.data_ptr(), storage.nbytes(), tensor.element_size(), storage)
        known = self._view(tensor)
        return torch.zeros(tensor.shape, dtype=torch.int64) if known is None else known

    def numbers(self, value: Any) -> np.ndarray | None:
        if isinstance(value, torch.Tensor):
            view = self._view(value)
            return None if view is None else self._array(view).copy()
        return super().numbers(value)


def _values(tensor: Any) -> np.ndarray:
    """A copy of a tensor's numbers; empty for what is none."""
    if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point() or tensor.is_meta:
        return np.zeros(0)
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return np.zeros(0)
    found: np.ndarray = _PLAIN_NUMPY(tensor.detach().double().clone())
    return found


def _viewing(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    result = _PLAIN_NUMPY(tensor, *args, **kwargs)
    return tracked(result) if active() else result


def _of_array(function: Any) -> Any:
    """`torch.tensor`, which copies."""

    def make(data: Any, *args: Any, **kwargs: Any) -> Any:
        result = function(plain(data), *args, **kwargs)
        for shadows in active():
            if not isinstance(shadows, TensorShadows):
                continue
            numbers = shadows.numbers(data)
            if numbers is not None and numbers.size == result.numel():
                if result.data_ptr() != address_of(data):
                    shadows._set(result, torch.from_numpy(numbers).reshape(result.shape))
        return result

    return make


@contextmanager
def tracking_tensors(shadows: Callable[[], Sequence[Any]]) -> Iterator[None]:
    """Context in which NumPy's arrays are looked at, and what torch makes of them.

    Args:
        shadows: returns those of functions that are running.
    """
    with ExitStack() as stack:
        stack.enter_context(tracking(shadows))
        stack.callback(setattr, torch, "tensor", torch.tensor)
        torch.tensor = _of_array(torch.tensor)
        torch.Tensor.numpy = _viewing  # type: ignore[method-assign, assignment]
        stack.callback(delattr, torch.Tensor, "numpy")
        yield
