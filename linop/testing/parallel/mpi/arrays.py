"""Arrays of NumPy in functions that are looked at, read element by element.

What NumPy does is seen by `Tracked`, a subclass of its arrays that its functions return meanwhile,
and the functions that are looked at are given. Between a tensor of torch and a call of mpi4py,
programs use NumPy, too: ``tensor.numpy()`` is a view of the tensor's memory, buffers are made,
copied, added (`linop.testing.parallel.mpi.tensor_shadows`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from linop.testing.parallel.mpi.array_shadows import ArrayShadows
from linop.testing.parallel.mpi.buffers import address_of
from linop.testing.parallel.recording.records import UNKNOWN, ZERO

_MOVING = {
    "append", "array_split", "atleast_1d", "atleast_2d", "block", "broadcast_to",
    "column_stack", "concatenate", "copy", "delete", "diagonal", "dsplit", "dstack",
    "expand_dims", "flip", "fliplr", "flipud", "hsplit", "hstack", "insert", "moveaxis",
    "pad", "ravel", "repeat", "reshape", "roll", "rollaxis", "rot90", "split", "squeeze",
    "stack", "swapaxes", "take", "tile", "transpose", "tril", "triu", "vsplit", "vstack",
}  # fmt: skip
"""Functions of NumPy that move elements: done to shadows as they are done to values."""
_METHODS = ("copy", "flatten", "ravel", "repeat", "reshape", "take")
"""Methods of arrays that may copy elements."""
_ACTIVE: list[Callable[[], Sequence[Any]]] = []
"""Functions that return the shadows of functions that are running."""


def active() -> list[ArrayShadows]:
    return [one for get in _ACTIVE for one in get() if isinstance(one, ArrayShadows)]


def _wanted() -> list[ArrayShadows]:
    """The active shadows, if the program itself has called; none for NumPy, torch and linop."""
    caller = sys._getframe(2).f_globals.get("__name__", "").partition(".")[0]
    return [] if caller in ("linop", "numpy", "torch") else active()


class Tracked(np.ndarray):
    """An array whose operations are done to its shadows."""

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        out = kwargs.pop("out", ())
        values = [plain(one) for one in inputs]
        targets = tuple(plain(one) for one in out)
        running = active()
        made = [one.ufunc(ufunc.__name__, method, values, kwargs) for one in running]
        extra = {"out": targets} if out else {}
        kwargs = {key: plain(one) for key, one in kwargs.items()}
        result = getattr(ufunc, method)(*values, **kwargs, **extra)
        if method == "at":
            for shadows, what in zip(running, made, strict=True):
                shadows.write(values[0], UNKNOWN if what is not None else ZERO)
            return None
        for shadows, what in zip(running, made, strict=True):
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
        running = active()
        known = [
            None if name not in _MOVING else _applied(func, one, args, kwargs) for one in running
        ]
        touched = [
            any(one.numbers(leaf) is not None for leaf in _leaves((args, kwargs)))
            for one in running
        ]
        result = func(*_mapped(args, plain), **_mapped(kwargs, plain))
        for shadows, numbers, is_touched in zip(running, known, touched, strict=True):
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
            for shadows in active():
                known = shadows.numbers(self)
                if known is not None:
                    shadows.write(result, known[_mapped(key, plain)])
        elif not isinstance(result, np.ndarray) and self.dtype.kind in "fc":
            # One element: an array of no dimensions, which keeps its number.
            one = plain(self)[(*key, ...) if isinstance(key, tuple) else (key, ...)]
            return tracked(one) if active() else result
        return tracked(result)

    def __setitem__(self, key: Any, value: Any) -> None:
        place = _mapped(key, plain)
        for shadows in active():
            numbers: Any = shadows.numbers(value)
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
            for shadows in active():
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
    for shadows in active():
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


# Functions of NumPy that make arrays


def _creating(function: Any) -> Any:
    def create(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        running = _wanted()
        for shadows in running:
            if isinstance(result, np.ndarray):
                shadows.write(result, ZERO)
        return tracked(result) if running else result

    return create


def _converting(function: Any) -> Any:
    def convert(source: Any, *args: Any, **kwargs: Any) -> Any:
        result = function(plain(source), *args, **kwargs)
        running = _wanted()
        if running and isinstance(result, np.ndarray) and result.dtype.kind in "fc":
            if isinstance(source, list | tuple) and any(isinstance(o, Tracked) for o in source):
                stacked = np.stack([np.asarray(one) for one in source])
                _copied(stacked, result)
            elif isinstance(source, np.ndarray) and not np.may_share_memory(result, source):
                _copied(source, result)
            elif hasattr(source, "untyped_storage"):  # a tensor of torch
                if source.data_ptr() != address_of(result):
                    _copied(source.detach(), result)
        return tracked(result) if running else result

    return convert


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
    ]  # fmt: skip
    with ExitStack() as stack:
        _ACTIVE.append(shadows)
        stack.callback(_ACTIVE.remove, shadows)
        for owner, name, new in changes:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, new)
        yield
