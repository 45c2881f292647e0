"""Functions of other libraries without copies: arguments that they cannot change, and results that
nobody else refers to.

A function that is not ours may change its argument, or return a view of it or of a buffer that it
keeps. Copies on both sides make that harmless, and cost two passes over memory.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from linop.normal_form.maps import Function, read_only
from linop.spaces.scalars import Array


def borrowing(function: Function) -> Function:
    """A function of an array as one that leaves it as it is, and returns memory of its own.

    The argument is lent as a read-only view, until the function fails on one: from then on it gets
    copies. The result is copied if it, or the memory of which it is a view, has other references.
    """
    lends = True

    def call(x: Array) -> Array:
        nonlocal lends
        if lends:
            try:
                return _own(*_counted(function, read_only(x)))
            except Exception:  # as compiled code that asks for an array that it may write to
                pass
        y = _own(*_counted(function, x.copy()))
        lends = False
        return y

    return call


def _counted(function: Function, x: Any) -> tuple[Array, int, int]:
    """The result, its number of references, and that of its base."""
    y = np.asarray(function(x))
    base = y.base
    return y, _references(y), _references(base)


def _own(y: Array, of_result: int, of_base: int) -> Array:
    base = y.base
    alone = of_result == _ALONE and (
        base is None or (type(base) is np.ndarray and base.flags.owndata and of_base == _BASE)
    )
    return y if alone and y.flags.writeable else y.copy()


def _references(thing: Any) -> int:
    return sys.getrefcount(thing) if hasattr(sys, "getrefcount") else -1


# Interpreters count the references of running frames differently; one without counts copies.
_ALONE = _counted(lambda x: np.empty(1), None)[1] if hasattr(sys, "getrefcount") else 0
_BASE = _counted(lambda x: np.empty(2)[1:], None)[2]
