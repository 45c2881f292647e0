"""Operators remember the call of a public function that made them: so they print as code
(`linop.testing.code`), and pickle as what makes them again elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np

Args = ParamSpec("Args")
Made = TypeVar("Made")


class Call(NamedTuple):
    """A function, and what it was given."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: dict[str, Any]


def remembered(function: Callable[Args, Made]) -> Callable[Args, Made]:
    """Let what a function makes know the call, as its attribute ``call``."""

    @wraps(function)
    def remembering(*arguments: Args.args, **options: Args.kwargs) -> Made:
        given = tuple(map(_kept, arguments))
        named = {name: _kept(value) for name, value in options.items()}
        made = function(*given, **named)
        if not any(made is value for value in given):
            vars(made)["call"] = Call(remembering, given, named)
        return made

    return remembering


def call_again(call: Call) -> Any:
    """What the call makes."""
    return call.function(*call.arguments, **call.options)


def _kept(value: Any) -> Any:
    """An argument as it is now: what its owner may change later, as our own copy."""
    if type(value) in (list, tuple):
        return type(value)(map(_kept, value))
    if type(value) is dict:
        return {key: _kept(item) for key, item in value.items()}
    # Sparse matrices and tensors are known by what they can: nothing is imported for them.
    if isinstance(value, np.ndarray) or hasattr(value, "tocsr"):
        return value.copy()
    return np.array(value) if hasattr(value, "__array__") and np.ndim(value) else value
