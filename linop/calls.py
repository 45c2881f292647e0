"""Operators remember the call of a public function that made them: so they print as code
(`linop.testing.code`), and pickle as what makes them again elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

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
        made = function(*arguments, **options)
        if not any(made is given for given in arguments):
            vars(made)["call"] = Call(remembering, arguments, options)
        return made

    return remembering


def call_again(call: Call) -> Any:
    """What the call makes."""
    return call.function(*call.arguments, **call.options)
