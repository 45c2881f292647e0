"""Functions that torch writes in Python, as they are written."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from functools import cache
from typing import Any


def _no(*_: Any) -> bool:
    return False


_CHECKS = "has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"


@cache
def opened(func: Callable[..., Any]) -> Callable[..., Any] | None:
    """A function of torch that is written in Python, without its question whether arguments are of
    a class of their own: so it runs, and the functions that it calls ask."""
    inner = inspect.unwrap(func)
    if not isinstance(inner, types.FunctionType) or not str(inner.__module__).startswith("torch"):
        return None
    names = {name: _no for name in _CHECKS if name in inner.__globals__}
    opened = types.FunctionType(
        inner.__code__,
        {**inner.__globals__, **names},
        inner.__name__,
        inner.__defaults__,
        inner.__closure__,
    )
    opened.__kwdefaults__ = inner.__kwdefaults__
    return opened
