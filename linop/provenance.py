"""Operators remember the call of a public function that made them: so they print as code
(`linop.testing.code`), and pickle as what makes them again elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, wraps
from typing import Any, NamedTuple, ParamSpec, Self, TypeVar

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


class Shared(cached_property[Made]):
    """A cached property that has one first value, though several threads ask for it at once."""

    def __get__(self, owner: Any, kind: Any = None) -> Any:  # type: ignore[override]
        return self if owner is None else vars(owner).setdefault(self.attrname, self.func(owner))


class Keeper:
    """An object with which others keep what they have made of it, as long as it lives."""

    @Shared
    def kept(self) -> dict[Any, Any]:
        """By keys of theirs; no part of copies."""
        return {}


class Remembering(Keeper):
    """Frozen data that pickles as the call that made it, or made its adjoint; so functions of
    `linop.local` alone must pickle."""

    call: Call | None = None
    _h: Any
    """Its adjoint, once it was asked for; or None."""

    def __deepcopy__(self, memo: object) -> Self:
        """Itself: it is frozen."""
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.call is not None:
            return _call_again, (self.call,)
        if self._h is not None and self._h.call is not None:
            return _adjoint_of, (self._h,)
        return super().__reduce_ex__(protocol)

    def __getstate__(self) -> dict[str, Any]:
        """Without what is derived from it."""
        own = dict(vars(self))
        for name in [k for k in own if isinstance(getattr(type(self), k, None), cached_property)]:
            del own[name]
        return own | {"_h": None}


def _call_again(call: Call) -> Any:
    return call.function(*call.arguments, **call.options)


def _adjoint_of(op: Any) -> Any:
    return op.H


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
