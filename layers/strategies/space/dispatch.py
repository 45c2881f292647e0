"""Which rule computes a function of cut tensors.

A function that torch writes in Python is run as it is written, down to those that have rules; a
function without a rule is computed of whole tensors, by every worker, with a warning.
"""

from __future__ import annotations

import inspect
import warnings
from types import FrameType, FunctionType
from typing import Any

import torch
from torch._compile import _disable_dynamo

from linop.errors import PartitionError
from linop.strategies.space.call import Call, Gathered, Refused, leaves, mapped
from linop.strategies.space.cut_tensor import CutTensor
from linop.strategies.space.draws import resumed
from linop.strategies.space.opening import opened
from linop.strategies.space.places import line, place
from linop.strategies.space.rules.elementwise import elementwise
from linop.strategies.space.rules.table import PYTHON, QUIET, REFUSED, RULES, pointwise
from linop.strategies.space.saving import saving


class GatheredWarning(UserWarning):
    """A function was computed of whole tensors, on every worker."""


@_disable_dynamo  # torch.compile goes on behind it
def computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The result of a function of torch.

    Raises:
        PartitionError: it cannot be computed of tensors that are cut.
    """
    grid = next(x.grid for x in leaves(args, kwargs) if isinstance(x, CutTensor))
    name = name_of(func)
    is_python = isinstance(func, FunctionType)
    rule = PYTHON.get(name) if is_python else RULES.get(name)
    if rule is None and is_python and func.__module__ == "torch._tensor":
        rule = RULES.get(name)  # methods, of which torch gives the one in C++ under the same name
    if rule is None and not is_python and pointwise(name):
        rule = elementwise
    call = Call(grid, name, func)
    try:
        if saving() is not None and not torch.is_grad_enabled() and _in_a_function():
            raise Refused(
                "of a tensor that is cut, inside of a torch.autograd.Function, whose backward "
                "would not be reached; write it of torch's functions (checkpoints: with "
                "use_reentrant=False)"
            )
        if name in REFUSED:
            raise Refused(REFUSED[name])
        if rule is not None:
            try:
                return rule(call, *args, **kwargs)
            except Gathered:
                pass
        elif is_python and (body := opened(func)) is not None:
            with resumed():
                return body(*args, **kwargs)
        return _of_whole(call, args, kwargs)
    except Refused as refusal:
        raise PartitionError(f"{place()}{name} {refusal}") from None


_APPLY = getattr(getattr(torch.autograd.Function.apply, "__func__", None), "__code__", None)
"""Since torch 2.14 it is of C, and has none; its context is looked for then."""


def _in_a_function() -> bool:
    """True in the forward of a `torch.autograd.Function`."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is _APPLY or (_APPLY is None and _has_context(frame)):
            return True
        frame = frame.f_back
    return False


def _has_context(frame: FrameType) -> bool:
    """True if the first argument of a call is the context of a `torch.autograd.Function`."""
    name = frame.f_code.co_varnames[0] if frame.f_code.co_argcount else ""
    return isinstance(frame.f_locals.get(name), torch.autograd.function.FunctionCtx)


def name_of(func: Any) -> str:
    """The name of a function; of a property, its own."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        owner = getattr(func, "__self__", None)
        own = getattr(owner, "__name__", "")
        return str(own) if name == "__get__" else f"{own}={name}"
    return str(name)


def _of_whole(call: Call, args: Any, kwargs: dict[str, Any]) -> Any:
    """A function of whole tensors, which every worker computes."""
    name = call.name
    changes = name.endswith("_") and not name.endswith("__")
    if changes or name.startswith("__i") or kwargs.get("out") is not None or "=" in name:
        raise Refused(
            "of a tensor that is cut changes it in place, and has no rule for that; write it "
            "without changing its argument, or of the whole tensor, x.whole()"
        )
    if name not in QUIET:
        _warn(f"{place()}{name}", line())
    args, kwargs = mapped(_whole, args, kwargs)
    with resumed():
        return call.function(*args, **kwargs)


def _warn(what: str, where: str) -> None:
    if (what, where) not in _WARNED:
        _WARNED.add((what, where))
        warnings.warn(
            f"{what} is computed of whole tensors on every worker: there is no rule that cuts it",
            GatheredWarning,
            stacklevel=4,
        )


_WARNED: set[tuple[str, str]] = set()


def _whole(x: Any) -> Any:
    return x.whole() if isinstance(x, CutTensor) else x
