"""Functions that torch writes in Python, as they are written."""

from __future__ import annotations

import inspect
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


class _Running(threading.local):
    def __init__(self) -> None:
        self.functions: list[Callable[..., Any]] = []


_RUNNING = _Running()


def is_running(func: Callable[..., Any]) -> bool:
    """True inside of the body of a function that was opened: what it calls has led back to it, as
    in `torch.unique`, whose parts ask for overrides of `torch.unique`. To open it again would not
    end."""
    return func in _RUNNING.functions


@contextmanager
def running(func: Callable[..., Any]) -> Iterator[None]:
    """Context of the body of a function that was opened."""
    _RUNNING.functions.append(func)
    try:
        yield
    finally:
        _RUNNING.functions.pop()
