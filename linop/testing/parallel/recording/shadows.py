"""Local parts of `autograd.Function`s that move data, read element by element.

While a function runs, each of its tensors has a shadow: numbers of elements in place of values,
laid out in memory as the tensor is. What torch does to a tensor (views, transposes, copies, sums)
is done to its shadow; a collective gives new numbers, and is written down. In the end the shadows
of the results tell which elements of arguments and of collectives they are: a matrix, exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from linop.testing.parallel.recording.records import UNKNOWN, ZERO, Lifted, Moved
from linop.testing.parallel.recording.tensors import ends_a_collective, in_memory, memory

_MADE = {"empty", "empty_like", "zeros", "zeros_like", "new_empty", "new_zeros", "empty_strided",
         "new_empty_strided"}  # fmt: skip
_COPIED = {"clone", "cat", "stack", "index_select", "index", "gather", "roll", "flip", "repeat",
           "slice_scatter", "select_scatter", "tril", "triu", "constant_pad_nd", "scatter",
           "index_copy", "unfold_copy", "split_with_sizes_copy", "chunk_cat"}  # fmt: skip
_ADDED = {"add": 1.0, "add_": 1.0, "sub": -1.0, "sub_": -1.0}
_SCALED = {"mul", "mul_", "div", "div_", "neg", "neg_"}


class Shadows:
    """The shadows of one run of a function."""

    def __init__(self, call: int, backward: bool, given: Sequence[torch.Tensor | None]) -> None:
        self.lifted = Lifted(call, backward)
        self._next = 1
        self._blind = False
        self._stores: dict[int, torch.Tensor] = {}
        self._kept: list[Any] = []
        for one in given:
            self.lifted.given.append(self._numbered(one))

    def _numbered(self, given: torch.Tensor | None) -> np.ndarray:
        """New numbers for the elements of a tensor."""
        tensor = None if given is None else memory(given)
        if tensor is None or not _is_tracked(tensor):
            return np.zeros(0, np.int64)
        known = self._view(tensor)
        fresh = torch.arange(self._next, self._next + tensor.numel()).reshape(tensor.shape)
        if known is not None and bool((known != ZERO).any()):
            return known.numpy().copy()  # one tensor given twice
        if 0 in tensor.stride() and tensor.numel() > 1:  # elements that are the same memory
            view = self._made(tensor)
            store = self._stores[tensor.untyped_storage().data_ptr()]
            store.copy_(torch.arange(self._next, self._next + store.numel()))
            self._next += store.numel()
            return view.numpy().copy()
        self._next += tensor.numel()
        self._set(tensor, fresh)
        return fresh.numpy().copy()

    def finish(self, made: Sequence[torch.Tensor | None]) -> Lifted:
        for one in (None if each is None else memory(each) for each in made):
            if self._blind and one is not None and _is_tracked(one):
                self.lifted.made.append(np.full(tuple(one.shape), UNKNOWN))
                continue
            shadow = self._view(one) if one is not None and _is_tracked(one) else None
            if shadow is None:
                shape = () if one is None else tuple(one.shape)
                known = np.full(shape, UNKNOWN) if _is_tracked(one) else np.zeros(0, np.int64)
                self.lifted.made.append(known)
            else:
                self.lifted.made.append(shadow.numpy().copy())
        return self.lifted

    # Memory

    def _view(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The shadow of a tensor; None if its memory has none."""
        store = self._stores.get(tensor.untyped_storage().data_ptr())
        if store is None or tensor.numel() == 0:
            return None
        return torch.as_strided(store, tensor.shape, tensor.stride(), tensor.storage_offset())

    def _made(self, tensor: torch.Tensor) -> torch.Tensor:
        """The shadow of a tensor; a new one of zeros if its memory has none."""
        storage = tensor.untyped_storage()
        place = storage.data_ptr()
        if place not in self._stores:
            size = storage.nbytes() // max(tensor.element_size(), 1)
            self._stores[place] = torch.zeros(size, dtype=torch.int64)
            self._kept.append(storage)  # so that its memory is not used again
        found = self._view(tensor)
        return torch.zeros(tensor.shape, dtype=torch.int64) if found is None else found

    def _set(self, tensor: torch.Tensor, numbers: torch.Tensor | int) -> None:
        shadow = self._made(tensor)
        if shadow.numel():
            if isinstance(numbers, int):
                shadow.fill_(numbers)
            else:
                shadow.copy_(numbers.expand(shadow.shape))

    def _of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The shadow of an argument; memory that the function has not seen is unknown."""
        found = self._view(tensor)
        return torch.full(tensor.shape, UNKNOWN) if found is None else found

    # Operations

    def collective(
        self, number: int, given: Sequence[Any], made: Sequence[Any], raw: bool = False
    ) -> None:
        """A collective; called before it runs.

        Args:
            raw: it takes elements in the order of memory, whatever the strides of its tensors.
        """
        if raw:
            given, made = ([in_memory(one) for one in side] for side in (given, made))
        before = [self._of(one).reshape(-1).numpy().copy() for one in given]
        after = []
        for one in made:
            fresh = torch.arange(self._next, self._next + one.numel()).reshape(one.shape)
            self._next += one.numel()
            self._set(one, fresh)
            after.append(fresh.reshape(-1).numpy().copy())
        self.lifted.moved.append(Moved(number, before, after))

    def operation(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """An operation of torch, after it has run."""
        try:
            self._followed(func, args, kwargs, result)
        except (RuntimeError, TypeError, ValueError, IndexError):
            # The program goes on, and the movement is not decided.
            self.lifted.unknown = self.lifted.unknown or str(func)
            self._blind = True

    def _followed(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        name = func._schema.name.partition("::")[2]
        with torch._C.DisableTorchFunction():
            outputs = [one for one in _flat(result) if _is_tracked(one)]
            inputs = [one for one in _flat((args, kwargs)) if _is_tracked(one)]
            places = {one.untyped_storage().data_ptr() for one in inputs}
            if not outputs or not (inputs or name in _MADE):
                return  # constants
            if name.endswith("_") and not name.endswith("__"):
                self._in_place(name, args, kwargs)
            elif all(one.untyped_storage().data_ptr() in places for one in outputs):
                return  # views
            elif name in _MADE:
                for one in outputs:
                    self._set(one, ZERO)
            elif name == "_to_copy":
                self._set(outputs[0], self._of(inputs[0]))
            elif name in _COPIED:
                shadows = func(*_replaced(args, self._of), **_plain(_replaced(kwargs, self._of)))
                for one, shadow in zip(outputs, _flat(shadows), strict=True):
                    self._set(one, shadow)
            elif name in _ADDED or name in _SCALED:
                self._linear(name, outputs[0], args, kwargs)
            elif name == "sum":
                self._summed(outputs[0], args, kwargs)
            else:
                self._lost(name, outputs, inputs)

    def _in_place(self, name: str, args: Any, kwargs: Any) -> None:
        target = args[0]
        if name == "copy_":
            source = args[1]
            if _is_tracked(source) and self._completes(target, source):
                return
            self._set(target, self._of(source) if _is_tracked(source) else UNKNOWN)
        elif name == "zero_" or (name == "fill_" and _is_zero(_number(args[1], self))):
            self._set(target, ZERO)
        elif name in _ADDED or name in _SCALED:
            self._linear(name, target, args, kwargs)
        elif name == "set_":
            return
        else:
            self._lost(name, [target], [one for one in _flat(args) if _is_tracked(one)])

    def _completes(self, target: torch.Tensor, source: torch.Tensor) -> bool:
        """True if a copy is the end of a collective, as gloo's reduce-scatter has one: from memory
        that the function has not seen to what the collective makes."""
        known = None if self._view(source) is not None else self._view(target)
        if known is None or not ends_a_collective():
            return False
        return any(np.isin(known.numpy(), made).all() for one in self.lifted.moved
                   for made in one.made)  # fmt: skip

    def _lost(self, name: str, outputs: Any, inputs: Any) -> None:
        known = any(bool((self._of(one) != ZERO).any()) for one in inputs)
        for one in outputs:
            self._set(one, UNKNOWN if known or not inputs else ZERO)
        if known:
            self.lifted.unknown = self.lifted.unknown or name

    def _linear(self, name: str, target: torch.Tensor, args: Any, kwargs: Any) -> None:
        """A sum of two tensors, or a multiple of one."""
        first, second = args[0], args[1] if len(args) > 1 else None
        if name in _ADDED:
            factor = _ADDED[name] * float(kwargs.get("alpha", 1))
            if not (_is_tracked(first) and _is_tracked(second)):
                self._lost(name, [target], [one for one in (first, second) if _is_tracked(one)])
                return
            terms = [(first, 1.0), (second, factor)]
        else:
            number = -1.0 if second is None else _number(second, self)
            if number is None and _is_tracked(second) and name.startswith("mul"):
                first, number = second, _number(first, self)
            if number is None or not _is_tracked(first):
                self._lost(name, [target], [one for one in (first, second) if _is_tracked(one)])
                return
            terms = [(first, 1 / number if name.startswith("div") else number)]
        shadows = [
            (self._of(one).expand(target.shape).reshape(-1).numpy().copy(), _spread(k, target))
            for one, k in terms
        ]
        self._combined(target, shadows)

    def _summed(self, target: torch.Tensor, args: Any, kwargs: Any) -> None:
        source = args[0]
        dims = args[1] if len(args) > 1 else kwargs.get("dim")
        listed = [dims] if isinstance(dims, int) else list(dims or range(source.dim()))
        listed = sorted(d % max(source.dim(), 1) for d in listed)
        shadow = self._of(source)
        rest = [d for d in range(source.dim()) if d not in listed]
        moved = shadow.permute(*rest, *listed).reshape(target.numel(), -1)
        self._combined(target, [(moved[:, k].numpy().copy(), 1.0) for k in range(moved.shape[1])])

    def _combined(self, target: torch.Tensor, terms: Sequence[tuple[np.ndarray, Any]]) -> None:
        """New numbers for the elements of a tensor, as sums of multiples of others."""
        count = target.numel()
        fresh = np.arange(self._next, self._next + count)
        unknown = np.zeros(count, bool)
        for numbers, factor in terms:
            unknown |= numbers == UNKNOWN
            there = numbers > 0
            factors = np.broadcast_to(np.asarray(factor, float), numbers.shape)[there]
            self.lifted.sums.append((fresh[there], numbers[there], factors))
        self._next += count
        made = np.where(unknown, UNKNOWN, fresh)
        self._set(target, torch.from_numpy(made).reshape(target.shape))


def _number(value: Any, shadows: Shadows) -> Any:
    """A constant factor: a number, or the array of a tensor that depends on no argument."""
    if isinstance(value, int | float):
        return float(value)
    if _is_tensor(value) and not value.is_meta and not value.is_complex():
        if not _is_tracked(value) or shadows._view(value) is None:
            return value.detach().double().numpy()
    return None


def _is_zero(number: Any) -> bool:
    return number is not None and not np.any(number)


def _spread(factor: Any, target: torch.Tensor) -> Any:
    """A factor for each element of a tensor, flat, or one for all."""
    if isinstance(factor, np.ndarray):
        return np.broadcast_to(factor, tuple(target.shape)).reshape(-1)
    return factor


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _is_tracked(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and (value.is_floating_point() or value.is_complex())
        and value.layout == torch.strided
        and not value.is_meta
        and not torch._C._functorch.is_functorch_wrapped_tensor(value)
        and type(value) in (torch.Tensor, torch.nn.Parameter)
    )


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for one in value:
            yield from _flat(one)
    else:
        yield value


def _replaced(value: Any, change: Any) -> Any:
    """With floating-point tensors replaced."""
    if isinstance(value, dict):
        return {key: _replaced(one, change) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_replaced(one, change) for one in value)
    return change(value) if _is_tracked(value) else value


def _plain(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {key: one for key, one in kwargs.items() if key not in ("dtype", "device", "layout")}
