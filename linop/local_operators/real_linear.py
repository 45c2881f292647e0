"""Functions and operators that say that they are linear over the real numbers only: PyLops'
``clinear=False``, as a Fourier transform of real arrays, or a real part."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np

from linop.caching import attributes


def real_linear(*given: Any) -> bool:
    """True if an operator, a part of one, or the operator whose method a function is, says that it
    is linear over the real numbers only."""
    return any(_says_real(part) for one in given for part in _parts(one))


def _says_real(given: Any) -> bool:
    said = getattr(given, "clinear", True)
    return isinstance(said, bool | np.bool_) and not said


def _parts(given: Any) -> Iterator[Any]:
    """An operator, what it is made of, and the owners of functions that are methods."""
    todo, seen = [given], set()
    while todo:
        part = todo.pop()
        if id(part) in seen or isinstance(part, np.ndarray | np.generic | int | float | complex):
            continue
        seen.add(id(part))
        yield part
        if isinstance(part, functools.partial):
            todo += [part.func, *part.args]
        todo += [getattr(part, "__self__", None), getattr(part, "__wrapped__", None)]
        if hasattr(part, "matvec"):
            try:
                held = attributes(part)
            except AttributeError:  # it has slots
                held = {}
            todo += [value for value in held.values() if callable(value) or _is_operator(value)]
            args = held.get("args", ())
            todo += args if isinstance(args, tuple | list) else []


def _is_operator(value: Any) -> bool:
    # A module may warn of what it is asked for, as numpy.core does, which PyLops' operators hold.
    return not isinstance(value, ModuleType) and hasattr(value, "matvec")
