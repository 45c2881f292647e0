"""Provenance of operators: the call of the public function that built one, and derived data.

From the call, an operator prints as code (`linop.testing.code`), and unpickles by
repeating it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, Self, TypeVar

import numpy as np

from linop.caching import attributes, cached_property
from linop.graph import postorder

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
        if not _among(given, made):
            attributes(made)["origin"] = Origin(recording, given, named)
            if isinstance(made, WithOrigin):
                made._originated()
        return made

    return recording


class Keeper:
    """An object that carries a cache of data which other modules derive from it."""

    @cached_property
    def kept(self) -> dict[Any, Any]:
        """The cache, by keys of the modules that use it; not copied with the object."""
        return {}


DERIVED = ("_h", "_euclidean", "_conjugate", "_over_reals", "_simplified")
"""Attributes with what was derived from an object: not copied with it."""
SHALLOW = 20
"""Depth up to which an expression is pickled by pickle's own recursion."""


class WithOrigin(Keeper):
    """Frozen data that pickles as the call that built it or its adjoint. Hence only the arguments
    of that call, such as the functions given to `linop.local`, must be picklable. What a deep
    expression is built of is pickled before it, in order, so that no depth is too large."""

    origin: Origin | None = None
    depth = 0
    _h: Any
    """Its adjoint, once computed; else None."""
    _euclidean: Any
    """Its Euclidean adjoint, likewise."""

    def _originated(self) -> None:
        """Called when the origin is known."""

    def __copy__(self) -> Self:
        """The object itself, since it is frozen."""
        return self

    def __deepcopy__(self, memo: object) -> Self:
        """The object itself, since it is frozen."""
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        make, arguments, *rest = self._reduced(protocol)
        if self.depth <= SHALLOW or self in _pickled_in_order():
            return make, arguments, *rest
        *before, _ = postorder(self, _kept_in)
        return _made_after, (_InOrder(before), make, arguments), *rest

    def _reduced(self, protocol: Any) -> Any:
        if self.origin is not None:
            return _rebuilt, (self.origin,)
        if self._h is not None and self._h.origin is not None:
            return _adjoint_of, (self._h,)
        if self._euclidean is not None and self._euclidean.origin is not None:
            return _euclidean_of, (self._euclidean,)
        return super().__reduce_ex__(protocol)

    def __getstate__(self) -> dict[str, Any]:
        """The attributes without cached properties and what else was derived."""
        own = dict(attributes(self))
        for name in [k for k in own if isinstance(getattr(type(self), k, None), cached_property)]:
            del own[name]
        for name in DERIVED:
            own.pop(name, None)
        return own | {"_h": None, "_euclidean": None}


class _InOrder:
    """Objects that are pickled one after the other, each after those that it is built of."""

    def __init__(self, objects: list[WithOrigin]) -> None:
        self.objects = objects

    def __reduce__(self) -> Any:
        return list, (), None, self._each()

    def _each(self) -> Iterator[Any]:
        marked = _pickled_in_order()
        new = [one for one in self.objects if one not in marked]
        marked.update(new)
        try:
            yield from self.objects
            yield _End(new)  # pickled after the last of them
        except GeneratorExit:
            marked.difference_update(new)
            raise


class _End:
    """The end of a list of objects that are pickled in order."""

    def __init__(self, objects: list[WithOrigin]) -> None:
        self.objects = objects

    def __reduce__(self) -> Any:
        _pickled_in_order().difference_update(self.objects)
        return _made_after, (None, tuple, ())


class _Thread(threading.local):
    def __init__(self) -> None:
        self.marked: weakref.WeakSet[WithOrigin] = weakref.WeakSet()


_THREAD = _Thread()


def _pickled_in_order() -> weakref.WeakSet[WithOrigin]:
    """The objects that are being pickled in order in this thread."""
    return _THREAD.marked


def _kept_in(one: WithOrigin) -> list[WithOrigin]:
    """The objects that one is pickled with."""
    if one.origin is not None:
        return list(objects_in([one.origin.arguments, one.origin.options]))
    for other in (one._h, one._euclidean):
        if other is not None and other.origin is not None:
            return [other]
    return list(objects_in([one.__getstate__()]))


def objects_in(stack: list[Any]) -> Iterator[WithOrigin]:
    """The objects with an origin in nested tuples, lists and dicts."""
    while stack:
        item = stack.pop()
        if isinstance(item, WithOrigin):
            yield item
        elif type(item) is dict:
            stack.extend(item.values())
        elif type(item) in (tuple, list):
            stack.extend(item)


def _made_after(before: Any, make: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """An object, made after those that it is built of."""
    del before
    return make(*arguments)


def _rebuilt(origin: Origin) -> Any:
    return origin.function(*origin.arguments, **origin.options)


def _adjoint_of(op: Any) -> Any:
    return op.H


def _euclidean_of(op: Any) -> Any:
    return op.euclidean_adjoint


def _among(given: Any, made: Any) -> bool:
    """True if a function has returned one of its arguments, or of what lists of them hold."""
    if type(given) in (list, tuple):
        return any(_among(one, made) for one in given)
    return given is made


def _snapshot(value: Any) -> Any:
    """A snapshot of an argument: copies of lists, dicts, arrays, tensors and sparse matrices."""
    if type(value) in (list, tuple):
        return type(value)(map(_snapshot, value))
    if type(value) is dict:
        once = {id(item): _snapshot(item) for item in value.values()}
        return {key: once[id(item)] for key, item in value.items()}
    if isinstance(value, WithOrigin):  # immutable; as an array it would be its matrix
        return value
    # Sparse matrices and tensors are recognised by their methods, without importing packages.
    if isinstance(value, np.ndarray) or hasattr(value, "tocsr"):
        return value.copy()
    try:
        return np.array(value) if hasattr(value, "__array__") and np.ndim(value) else value
    except (TypeError, RuntimeError):  # another package's, which the constructor names
        return value
