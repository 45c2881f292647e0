"""Provenance of operators: the call of the public function that built one, and derived data.

From the call, an operator prints as code (`linop.testing.code`), and unpickles by
repeating it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, Self, TypeVar

import numpy as np

from linop.caching import cached_property

Args = ParamSpec("Args")
Made = TypeVar("Made")


class Origin(NamedTuple):
    """A function, its positional and its keyword arguments."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: dict[str, Any]


def records_origin(function: Callable[Args, Made]) -> Callable[Args, Made]:
    """Decorator that stores the `Origin` in the attribute ``origin`` of a function's result."""

    @wraps(function)
    def recording(*arguments: Args.args, **options: Args.kwargs) -> Made:
        given = tuple(map(_snapshot, arguments))
        named = {name: _snapshot(value) for name, value in options.items()}
        made = function(*given, **named)
        if not any(made is value for value in given):
            vars(made)["origin"] = Origin(recording, given, named)
        return made

    return recording


class Shared(cached_property[Made]):
    """A cached property with a single value for all threads, also on concurrent first access."""

    def __get__(self, owner: Any, kind: Any = None) -> Any:  # type: ignore[override]
        return self if owner is None else vars(owner).setdefault(self.attrname, self.func(owner))


class Keeper:
    """An object that carries a cache of data which other modules derive from it."""

    @Shared
    def kept(self) -> dict[Any, Any]:
        """The cache, by keys of the modules that use it; not copied with the object."""
        return {}


class WithOrigin(Keeper):
    """Frozen data that pickles as the call that built it or its adjoint. Hence only the arguments
    of that call, such as the functions given to `linop.local`, must be picklable."""

    origin: Origin | None = None
    _h: Any
    """Its adjoint, once computed; else None."""

    def __deepcopy__(self, memo: object) -> Self:
        """The object itself, since it is frozen."""
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.origin is not None:
            return _rebuilt, (self.origin,)
        if self._h is not None and self._h.origin is not None:
            return _adjoint_of, (self._h,)
        return super().__reduce_ex__(protocol)

    def __getstate__(self) -> dict[str, Any]:
        """The attributes without cached properties and the adjoint."""
        own = dict(vars(self))
        for name in [k for k in own if isinstance(getattr(type(self), k, None), cached_property)]:
            del own[name]
        return own | {"_h": None}


def _rebuilt(origin: Origin) -> Any:
    return origin.function(*origin.arguments, **origin.options)


def _adjoint_of(op: Any) -> Any:
    return op.H


def _snapshot(value: Any) -> Any:
    """A snapshot of an argument: copies of lists, dicts, arrays, tensors and sparse matrices."""
    if type(value) in (list, tuple):
        return type(value)(map(_snapshot, value))
    if type(value) is dict:
        return {key: _snapshot(item) for key, item in value.items()}
    # Sparse matrices and tensors are recognised by their methods, without importing packages.
    if isinstance(value, np.ndarray) or hasattr(value, "tocsr"):
        return value.copy()
    return np.array(value) if hasattr(value, "__array__") and np.ndim(value) else value
