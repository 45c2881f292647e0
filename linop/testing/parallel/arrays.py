"""Arrays of NumPy in `autograd.Function`s, read element by element beside torch's tensors.

Between a tensor and a call of mpi4py, programs use NumPy: ``tensor.numpy()`` is a view of the
tensor's memory, buffers are made, copied, added. What torch does is seen by its dispatcher; what
NumPy does is seen by `Tracked`, a subclass of its arrays that `tensor.numpy()` and NumPy's
functions return while a step is recorded. Shadows are kept by addresses of memory, so that an array
and a tensor that share memory have the same ones.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch

from linop.testing.parallel.buffers import Area, address_of
from linop.testing.parallel.shadows import UNKNOWN, ZERO, Moved, Shadows

_MOVING = {
    "append", "array_split", "atleast_1d", "atleast_2d", "block", "broadcast_to", "column_stack",
    "concatenate", "copy", "delete", "diagonal", "dsplit", "dstack", "expand_dims", "flip", "fliplr",
    "flipud", "hsplit", "hstack", "insert", "moveaxis", "pad", "ravel", "repeat", "reshape", "roll",
    "rollaxis", "rot90", "split", "squeeze", "stack", "swapaxes", "take", "tile", "transpose",
    "tril", "triu", "vsplit", "vstack",
}  # fmt: skip
"""Functions of NumPy that move elements: done to shadows as they are done to values."""
_METHODS = ("copy", "flatten", "ravel", "repeat", "reshape", "take")
"""Methods of arrays that may copy elements."""
_ADDED = {"add": 1.0, "subtract": -1.0}
_KEPT = {"positive", "conjugate"}

Terms = list[tuple[np.ndarray, Any]]
"""Numbers of elements, broadcast, with their factors; the sum of all is what is made."""


class ArrayShadows(Shadows):
    """Shadows of tensors and of NumPy's arrays."""

    def __init__(self, call: int, backward: bool, given: Sequence[torch.Tensor | None]) -> None:
        self._ends: dict[int, tuple[int, int]] = {}
        """By the first address of a piece of memory: the address behind it, and the size of its
        elements."""
        super().__init__(call, backward, given)
        self.lifted.values = [_values(one) for one in given]

    def finish(self, made: Sequence[torch.Tensor | None]) -> Any:
        lifted = super().finish(made)
        lifted.results = [_values(one) for one in made]
        return lifted

    # Memory

    def _found(self, address: int, itemsize: int) -> tuple[torch.Tensor, int] | None:
        """The shadows of the memory that an address lies in, and the position there."""
        for start, (end, size) in self._ends.items():
            if start <= address < end and size == itemsize and not (address - start) % size:
                return self._stores[start], (address - start) // size
        return None

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

    def _begin(self, start: int, length: int, itemsize: int, owner: Any) -> None:
        """Shadows of a piece of memory; the owner keeps it from being used again."""
        known = torch.zeros(length // max(itemsize, 1), dtype=torch.int64)
        for first, (end, size) in list(self._ends.items()):
            if start <= first and end <= start + length:  # parts of it, that were known alone
                at = (first - start) // itemsize
                if size == itemsize:
                    known[at : at + (end - first) // size] = self._stores[first]
                del self._ends[first], self._stores[first]
        self._stores[start], self._ends[start] = known, (start + length, itemsize)
        self._kept.append(owner)

    def shadow(self, array: np.ndarray) -> np.ndarray | None:
        """The numbers of an array's elements, a view of them; None if its memory has none."""
        if array.dtype.kind not in "fc" or not array.size:
            return None
        found = self._found(address_of(array), array.itemsize)
        if found is None or any(step % array.itemsize for step in array.strides):
            return None
        steps = [step // array.itemsize * 8 for step in array.strides]
        return np.ndarray(array.shape, np.int64, found[0].numpy(), found[1] * 8, steps)

    def numbers(self, value: Any) -> np.ndarray | None:
        """A copy of the numbers of an array's elements; None for what depends on no argument."""
        if isinstance(value, torch.Tensor):
            view = self._view(value)
            return None if view is None else view.numpy().copy()
        if not isinstance(value, np.ndarray):
            return None
        known = self.shadow(value)
        return None if known is None or not known.any() else known.copy()

    def write(self, array: np.ndarray, numbers: Any) -> None:
        """Set the numbers of an array's elements."""
        if array.dtype.kind not in "fc" or not array.size:
            return
        known = self.shadow(array)
        if known is None:
            owner = array
            while isinstance(owner.base, np.ndarray):
                owner = owner.base
            if owner.itemsize == array.itemsize and owner.flags.forc:
                self._begin(address_of(owner), owner.nbytes, owner.itemsize, owner)
            known = self.shadow(array)
        if known is not None:
            known[...] = numbers

    def combined(self, terms: Terms, shape: tuple[int, ...]) -> np.ndarray:
        """New numbers for elements that are sums of multiples of others."""
        count = int(np.prod(shape))
        fresh = np.arange(self._next, self._next + count)
        unknown = np.zeros(count, bool)
        for numbers, factor in terms:
            flat = np.broadcast_to(numbers, shape).ravel()
            there = flat > 0
            unknown |= flat == UNKNOWN
            factors = np.broadcast_to(np.asarray(factor, float), shape).ravel()[there]
            self.lifted.sums.append((fresh[there], flat[there], factors))
        self._next += count
        return np.where(unknown, UNKNOWN, fresh).reshape(shape)

    # Collectives

    def moved(self, number: int, given: Sequence[Area], made: Sequence[Area]) -> None:
        """A call of mpi4py."""
        before, after = [self._at(one).copy() for one in given], []
        for one in made:
            count = len(one.positions)
            fresh = np.arange(self._next, self._next + count)
            self._next += count
            if self.shadow(one.memory) is None:
                self.write(one.memory, ZERO)
            known = self.shadow(one.memory)
            if known is not None:
                known[one.positions] = fresh
            after.append(fresh)
        self.lifted.moved.append(Moved(number, before, after))

    def _at(self, one: Area) -> np.ndarray:
        known = self.shadow(one.memory)
        if known is None:
            return np.full(len(one.positions), UNKNOWN)
        found: np.ndarray = known[one.positions]
        return found

    # What NumPy does

    def ufunc(self, name: str, method: str, inputs: Sequence[Any], kwargs: Any) -> Any:
        """What a function of elements is going to make: terms of its result; UNKNOWN if that is not
        linear; None if nothing of the arguments is in it."""
        known = [self.numbers(one) for one in inputs]
        if all(one is None for one in known):
            return None
        if method == "reduce" and name == "add" and set(kwargs) <= {"axis", "keepdims", "dtype"}:
            return self._summed(known[0], kwargs)
        if method != "__call__" or "where" in kwargs:
            return UNKNOWN
        if name in _ADDED and len(inputs) == 2:
            terms: Terms = []
            for one, value, factor in zip(known, inputs, (1.0, _ADDED[name]), strict=True):
                if one is not None:
                    terms.append((one, factor))
                elif np.any(np.asarray(value) != 0):
                    return UNKNOWN
            return terms
        if name in _KEPT and (name == "positive" or inputs[0].dtype.kind == "f"):
            return [(known[0], 1.0)]
        if name == "negative":
            return [(known[0], -1.0)]
        if name == "multiply" and (known[0] is None or known[1] is None):
            at = 0 if known[1] is None else 1
            return _scaled(known[at], inputs[1 - at], inputs[at])
        if name in ("divide", "true_divide") and known[1] is None:
            return _scaled(known[0], 1.0 / np.asarray(inputs[1], float), inputs[0])
        return UNKNOWN

    def _summed(self, known: Any, kwargs: Any) -> Terms:
        axis = kwargs.get("axis", 0)
        axes = range(known.ndim) if axis is None else np.atleast_1d(axis) % known.ndim
        moved = np.moveaxis(known, tuple(axes), tuple(range(len(axes))))
        rest = moved.shape[len(axes) :]
        if kwargs.get("keepdims"):
            rest = tuple(1 if k in axes else n for k, n in enumerate(known.shape))
        pieces = moved.reshape(-1, *rest)
        return [(one, 1.0) for one in pieces]

    def result(self, array: Any, made: Any) -> None:
        """What a function has made: terms, UNKNOWN or None, as of `ufunc`."""
        if not isinstance(array, np.ndarray):
            if made is not None and array is not None:
                self.lifted.unknown = self.lifted.unknown or "a number made of elements"
            return
        if isinstance(made, list):
            self.write(array, self.combined(made, array.shape))
        elif made is not None:
            self.write(array, UNKNOWN)
        elif self.shadow(array) is not None:
            self.write(array, UNKNOWN if np.any(array) else ZERO)


def _scaled(known: Any, factor: Any, beside: np.ndarray) -> Any:
    value = np.asarray(factor)
    if value.dtype.kind not in "iufb":
        return UNKNOWN
    shape = np.broadcast_shapes(value.shape, beside.shape)
    return [(np.broadcast_to(known, shape), value)]


def _values(tensor: Any) -> np.ndarray:
    """A copy of a tensor's numbers; empty for what is none."""
    if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point() or tensor.is_meta:
        return np.zeros(0)
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return np.zeros(0)
    found: np.ndarray = _PLAIN_NUMPY(tensor.detach().double().clone())
    return found


_PLAIN_NUMPY = torch.Tensor.numpy
_ACTIVE: list[Callable[[], Sequence[Any]]] = []
"""Functions that return the shadows of functions that are running."""


def _active() -> list[ArrayShadows]:
    return [one for get in _ACTIVE for one in get() if isinstance(one, ArrayShadows)]


def _wanted() -> list[ArrayShadows]:
    """The active shadows, if the program itself has called; none for NumPy, torch and linop."""
    caller = sys._getframe(2).f_globals.get("__name__", "").partition(".")[0]
    return [] if caller in ("linop", "numpy", "torch") else _active()


class Tracked(np.ndarray):
    """An array whose operations are done to its shadows."""

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        out = kwargs.pop("out", ())
        values = [plain(one) for one in inputs]
        targets = tuple(plain(one) for one in out)
        active = _active()
        made = [one.ufunc(ufunc.__name__, method, values, kwargs) for one in active]
        extra = {"out": targets} if out else {}
        kwargs = {key: plain(one) for key, one in kwargs.items()}
        result = getattr(ufunc, method)(*values, **kwargs, **extra)
        if method == "at":
            for shadows, what in zip(active, made, strict=True):
                shadows.write(values[0], UNKNOWN if what is not None else ZERO)
            return None
        for shadows, what in zip(active, made, strict=True):
            for one in result if isinstance(result, tuple) else (result,):
                shadows.result(one, what)
        if out:
            return out[0] if len(out) == 1 else out
        return tracked(result)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        del types
        name = func.__name__
        if name == "copyto":
            args[0][...] = args[1]
            return None
        if name == "sum":
            return np.add.reduce(*args, **{"axis": None, **kwargs})
        active = _active()
        known = [
            None if name not in _MOVING else _applied(func, one, args, kwargs) for one in active
        ]
        touched = [
            any(one.numbers(leaf) is not None for leaf in _leaves((args, kwargs))) for one in active
        ]
        result = func(*_mapped(args, plain), **_mapped(kwargs, plain))
        for shadows, numbers, is_touched in zip(active, known, touched, strict=True):
            given = [one for one in _leaves((args, kwargs)) if isinstance(one, np.ndarray)]
            marks = list(_leaves(numbers)) if numbers is not None else None
            for k, one in enumerate(_leaves(result)):
                if not isinstance(one, np.ndarray):
                    if is_touched and isinstance(one, np.floating):
                        shadows.result(one, UNKNOWN)
                    continue
                if any(np.may_share_memory(one, other) for other in given):
                    continue
                if name in ("zeros_like", "empty_like"):
                    shadows.write(one, ZERO)
                elif marks is not None and len(marks) > k:
                    shadows.write(one, marks[k])
                elif is_touched:
                    shadows.write(one, UNKNOWN)
        return _mapped(result, tracked)

    def __getitem__(self, key: Any) -> Any:
        result = plain(self)[_mapped(key, plain)]
        if isinstance(result, np.ndarray) and not np.may_share_memory(result, self):
            for shadows in _active():
                known = shadows.numbers(self)
                if known is not None:
                    shadows.write(result, known[_mapped(key, plain)])
        elif not isinstance(result, np.ndarray) and self.dtype.kind in "fc":
            # One element: an array of no dimensions, which keeps its number.
            one = plain(self)[(*key, ...) if isinstance(key, tuple) else (key, ...)]
            return tracked(one) if _active() else result
        return tracked(result)

    def __setitem__(self, key: Any, value: Any) -> None:
        place = _mapped(key, plain)
        for shadows in _active():
            numbers = shadows.numbers(value)
            if numbers is None:
                numbers = ZERO if not np.any(np.asarray(plain(value))) else UNKNOWN
            known = shadows.shadow(self)
            if known is None:
                shadows.write(self, ZERO)
                known = shadows.shadow(self)
            if known is not None:
                known[place] = numbers
        plain(self)[place] = plain(value)

    def fill(self, value: Any) -> None:
        self[...] = value

    def sum(self, axis: Any = None, dtype: Any = None, out: Any = None, **kwargs: Any) -> Any:
        if out is not None or dtype is not None:
            return plain(self).sum(axis, dtype, out, **kwargs)
        return np.add.reduce(self, axis=axis, **kwargs)

    def astype(self, dtype: Any, *args: Any, **kwargs: Any) -> Any:
        result = plain(self).astype(dtype, *args, **kwargs)
        if not np.may_share_memory(result, self):
            _copied(self, result)
        return tracked(result)

    def __copy__(self) -> Any:
        return self.copy()

    def __deepcopy__(self, memo: Any) -> Any:
        del memo
        return self.copy()


def _method(name: str) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = getattr(plain(self), name)(*args, **kwargs)
        if isinstance(result, np.ndarray) and not np.may_share_memory(result, self):
            for shadows in _active():
                known = shadows.numbers(self)
                if known is not None:
                    shadows.write(result, getattr(known, name)(*args, **kwargs))
        return tracked(result)

    method.__name__ = name
    return method


for _name in _METHODS:
    setattr(Tracked, _name, _method(_name))


def plain(value: Any) -> Any:
    """An array as one of NumPy's own class; other things as they are."""
    return value.view(np.ndarray) if isinstance(value, Tracked) else value


def tracked(value: Any) -> Any:
    """An array of floating-point numbers as a `Tracked` one; other things as they are."""
    if type(value) is np.ndarray and value.dtype.kind in "fc":
        return value.view(Tracked)
    return value


def _copied(source: Any, result: np.ndarray) -> None:
    for shadows in _active():
        numbers = shadows.numbers(source)
        if numbers is not None and numbers.size == result.size:
            shadows.write(result, numbers.reshape(result.shape))


def _applied(func: Any, shadows: ArrayShadows, args: Any, kwargs: Any) -> Any:
    """A function that moves elements, done to their numbers; None if nothing is known of them."""

    def change(value: Any) -> Any:
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "fc":
            return value
        numbers = shadows.numbers(value)
        if numbers is None:
            return np.full(value.shape, UNKNOWN if np.any(value) else ZERO)
        return numbers

    return func(*_mapped(args, change), **_mapped(kwargs, change))


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {key: _mapped(one, change) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_mapped(one, change) for one in value)
    return change(value)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for one in value:
            yield from _leaves(one)
    else:
        yield value


# Functions of NumPy and torch that make arrays


def _creating(function: Any) -> Any:
    def create(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        active = _wanted()
        for shadows in active:
            if isinstance(result, np.ndarray):
                shadows.write(result, ZERO)
        return tracked(result) if active else result

    return create


def _converting(function: Any) -> Any:
    def convert(source: Any, *args: Any, **kwargs: Any) -> Any:
        result = function(plain(source), *args, **kwargs)
        active = _wanted()
        if active and isinstance(result, np.ndarray) and result.dtype.kind in "fc":
            if isinstance(source, list | tuple) and any(isinstance(o, Tracked) for o in source):
                stacked = np.stack([np.asarray(one) for one in source])
                _copied(stacked, result)
            elif isinstance(source, np.ndarray) and not np.may_share_memory(result, source):
                _copied(source, result)
            elif isinstance(source, torch.Tensor):
                if source.data_ptr() != address_of(result):
                    _copied(source.detach(), result)
        return tracked(result) if active else result

    return convert


def _viewing(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    result = _PLAIN_NUMPY(tensor, *args, **kwargs)
    return tracked(result) if _active() else result


def _of_array(function: Any) -> Any:
    """`torch.tensor`, which copies."""

    def make(data: Any, *args: Any, **kwargs: Any) -> Any:
        result = function(plain(data), *args, **kwargs)
        for shadows in _active():
            numbers = shadows.numbers(data)
            if numbers is not None and numbers.size == result.numel():
                if result.data_ptr() != address_of(data):
                    shadows._set(result, torch.from_numpy(numbers).reshape(result.shape))
        return result

    return make


@contextmanager
def tracking(shadows: Callable[[], Sequence[Any]]) -> Iterator[None]:
    """Context in which NumPy's arrays are looked at.

    Args:
        shadows: returns those of functions that are running.
    """
    changes: list[tuple[Any, str, Any]] = [
        *((np, name, _creating(getattr(np, name))) for name in ("zeros", "empty")),
        *((np, name, _converting(getattr(np, name)))
          for name in ("array", "asarray", "ascontiguousarray", "require")),
        (torch, "tensor", _of_array(torch.tensor)),
    ]  # fmt: skip
    with ExitStack() as stack:
        _ACTIVE.append(shadows)
        stack.callback(_ACTIVE.remove, shadows)
        for owner, name, new in changes:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, new)
        torch.Tensor.numpy = _viewing  # type: ignore[method-assign, assignment]
        stack.callback(delattr, torch.Tensor, "numpy")
        yield
