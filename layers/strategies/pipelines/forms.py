"""Structures of values, apart from the tensors in them: of what stages take and return, and of the
input of a pipeline.

A value is a tensor, a constant (None, a number, text, a dtype), or a tuple, list, mapping, named
tuple or data class of values. Its *form* says how it is made of its tensors, which are numbered. It
consists of tuples, texts and constants, so that workers compare it and send it.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linop.errors import ArgumentError

Form = tuple[Any, ...]
"""("tensor", number), ("constant", value), or a kind, names of members, their forms and, of a
record, its class: ("tuple" or "list", (), forms), ("dict", keys, forms), ("record", names, forms,
class)."""
Output = int | str
"""An output of a stage that goes along an edge: that of a number, of a name, or `ALL`."""
Leaf = tuple[Output, int]
"""An output, and the number of a tensor in it."""

ALL = -1
TENSOR: Form = ("tensor", 0)
_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


def members(value: Any) -> dict[Any, Any] | None:
    """Names and values of what a value consists of; None of a tensor, a constant, or another
    object. What is None in a class that is a mapping, too, as in those of transformers' outputs, is
    left out."""
    if isinstance(value, Mapping):
        return dict(value.items())
    if _is_record(type(value)):
        named = getattr(value, "_fields", None)
        names = named or [f.name for f in dataclasses.fields(value) if f.init]
        return {name: getattr(value, name) for name in names}
    if isinstance(value, tuple | list):
        return dict(enumerate(value))
    return None


def _is_record(kind: type) -> bool:
    return dataclasses.is_dataclass(kind) or (issubclass(kind, tuple) and hasattr(kind, "_fields"))


def form_of(value: Any, tensors: list[Tensor], path: str = "") -> Form:
    """The form of a value, whose tensors are appended to the list, and numbered by their places in
    it.

    Args:
        path: of the value, for errors.

    Raises:
        ArgumentError: something in it is none of the values that can be sent.
    """
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return ("tensor", len(tensors) - 1)
    if isinstance(value, _CONSTANTS):
        return ("constant", value)
    inner = members(value)
    if inner is None:
        raise ArgumentError(
            f"{path.lstrip('.') or 'value'} is {type(value)}; tensors, numbers, text and None "
            f"expected, or tuples, lists, mappings and data classes of these{_advice(value)}"
        )
    forms = tuple(form_of(one, tensors, f"{path}.{key}") for key, one in inner.items())
    if _is_record(type(value)):
        return ("record", tuple(inner), forms, _named(value))
    if isinstance(value, Mapping):
        return ("dict", tuple(inner), forms)
    return ("tuple" if isinstance(value, tuple) else "list", (), forms)


def _advice(value: Any) -> str:
    if "Cache" not in type(value).__name__:
        return ""
    return "; a model of transformers keeps no cache with use_cache=False in its configuration"


def _named(value: Any) -> str:
    """The name of a value's class, by which other workers find it."""
    kind = type(value)
    name = f"{kind.__module__}:{kind.__qualname__}"
    if _class(name) is not kind:
        raise ArgumentError(
            f"a class that can be imported expected, of what goes between stages, given {kind}; "
            f"give a dict or a tuple, or define the class in a module"
        )
    return name


def _class(name: str) -> Any:
    """A named tuple's or data class of a module that is imported already; None if there is none."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) and _is_record(found) else None


def rebuilt(form: Form, tensors: Sequence[Tensor]) -> Any:
    """The value of a form.

    Raises:
        ArgumentError: it has a class that this worker has not imported.
    """
    kind = form[0]
    if kind == "tensor":
        return tensors[form[1]]
    if kind == "constant":
        return form[1]
    inner = [rebuilt(one, tensors) for one in form[2]]
    if kind == "list":
        return inner
    if kind == "tuple":
        return tuple(inner)
    named = dict(zip(form[1], inner, strict=True))
    if kind == "dict":
        return named
    made = _class(form[3])
    if made is None:
        raise ArgumentError(
            f"a value of the class {form[3]!r} comes to a stage whose worker has not imported it; "
            f"import its module on every worker, or return a dict"
        )
    return made(**named)


def leaves(form: Form) -> Iterator[int]:
    """Numbers of the tensors in a value."""
    if form[0] == "tensor":
        yield form[1]
    elif form[0] != "constant":
        for one in form[2]:
            yield from leaves(one)


def moved(form: Form, by: int) -> Form:
    """The form with other numbers of tensors."""
    if form[0] == "tensor":
        return ("tensor", form[1] + by)
    if form[0] == "constant":
        return form
    return (form[0], form[1], tuple(moved(one, by) for one in form[2]), *form[3:])


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in a value; objects that could not be sent have none."""
    if isinstance(value, torch.Tensor):
        return [value]
    inner = members(value) or {}
    return [x for one in inner.values() for x in tensors_in(one)]


# Arguments of a module


class Layout(NamedTuple):
    """Structures around a stage for a micro-batch."""

    arguments: Form | None = None
    """Of its module; None: its inputs are tensors, by position."""
    outputs: Mapping[Output, Form] | None = None
    """Of what others take; None: not known."""


PLAIN = Layout()


def of_call(positional: Sequence[Form], named: Mapping[str, Form]) -> Form | None:
    """The form of a module's arguments; None if these are tensors by position, in order."""
    plain = [("tensor", k) for k in range(len(positional))]
    if not named and list(positional) == plain:
        return None
    return (
        "tuple",
        (),
        (("tuple", (), tuple(positional)), ("dict", tuple(named), tuple(named.values()))),
    )


def arguments(form: Form | None, tensors: Sequence[Tensor]) -> tuple[Sequence[Any], Any]:
    """Arguments of a module, by position and by name."""
    if form is None:
        return tensors, {}
    given: tuple[Sequence[Any], Any] = rebuilt(form, tensors)
    return given


def owners(form: Form | None, count: int) -> list[int | str]:
    """For each tensor of a call's arguments, that which it is in: its place or its name.

    Args:
        count: of the tensors.
    """
    if form is None:
        return list(range(count))
    found: dict[int, int | str] = {}
    positional, named = form[2]
    for key, one in [*enumerate(positional[2]), *zip(named[1], named[2], strict=True)]:
        found |= dict.fromkeys(leaves(one), key)
    return [found[k] for k in range(count)]


def of_outputs(outputs: Sequence[tuple[Output, Form]]) -> Form | None:
    """The form of a stage's arguments, of the outputs that it takes: one by its number is an
    argument by position, one by its name an argument of this name; all that a stage returns are
    several by position if it is a tuple or a list, and by name if it is a mapping or a record."""
    positional: list[Form] = []
    named: dict[str, Form] = {}
    count = 0
    for output, form in outputs:
        own = moved(form, count)
        count += sum(1 for _ in leaves(form))
        if isinstance(output, str):
            named[output] = own
        elif output == ALL and own[0] in ("tuple", "list"):
            positional += own[2]
        elif output == ALL and own[0] in ("dict", "record"):
            named |= dict(zip(own[1], own[2], strict=True))
        else:
            positional.append(own)
    return of_call(positional, named)


def chosen(result: Any, output: Output) -> Any:
    """An output of a stage's result.

    Raises:
        KeyError: there is none.
    """
    if output == ALL:
        return result
    inner = None if isinstance(result, torch.Tensor) else members(result)
    if isinstance(output, str):
        return (inner or {})[output]
    return dict(enumerate([result] if inner is None else inner.values()))[output]


def described(form: Form) -> str:
    """A form in words, for errors."""
    if form[0] == "tensor":
        return "tensor"
    if form[0] == "constant":
        return repr(form[1])
    inner = [described(one) for one in form[2]]
    if form[0] in ("tuple", "list"):
        return f"{form[0]} of {', '.join(inner) or 'nothing'}"
    name = "dict" if form[0] == "dict" else form[3].rpartition(":")[2]
    return f"{name}({', '.join(f'{k}={one}' for k, one in zip(form[1], inner, strict=True))})"
