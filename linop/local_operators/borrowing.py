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


def _counted(function: Function, x: Any) -> tuple[Array, bool]:
    """The result, and whether nobody else refers to it, or to the memory of which it is a view.

    By comparison with an object that is known to have one reference: what runs a frame, or watches
    it (a debugger, a profiler, torch.compile on any thread), may hold its variables, too. The
    result is first: who comes in between makes it look as if it had more holders, not fewer.
    """
    y = np.asarray(function(x))
    base = y.base
    one = object()
    alone = of_base = False
    if _COUNTS:  # an interpreter without counts copies
        alone = sys.getrefcount(y) == sys.getrefcount(one)
        # A view is one more reference to its base.
        of_base = sys.getrefcount(base) == sys.getrefcount(one) + 1
    if base is not None:
        alone = alone and of_base and type(base) is np.ndarray and base.flags.owndata
    return y, alone


def _own(y: Array, alone: bool) -> Array:
    return y if alone and y.flags.writeable else y.copy()


_COUNTS = hasattr(sys, "getrefcount")
