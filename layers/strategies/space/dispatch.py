"""Which rule computes a function of cut tensors.

A function that torch writes in Python is run as it is written, down to those that have rules; a
function without a rule is computed of whole tensors, by every worker, with a warning.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
import torch.utils.hooks
from torch._compile import _disable_dynamo

from linop.errors import PartitionError
from linop.strategies.space.call import Call, Gathered, Refused, leaves, mapped
from linop.strategies.space.cut_tensor import CutTensor
from linop.strategies.space.draws import resumed
from linop.strategies.space.opening import is_running, opened, running
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
    given = [x for x in leaves(args, kwargs) if isinstance(x, CutTensor)]
    grid = given[0].grid
    name = name_of(func)
    is_python = isinstance(func, FunctionType)
    rule = PYTHON.get(name) if is_python else RULES.get(name)
    if rule is None and is_python and func.__module__ == "torch._tensor":
        rule = RULES.get(name)  # methods, of which torch gives the one in C++ under the same name
    if rule is None and not is_python and pointwise(name):
        rule = elementwise
    call = Call(grid, name, func)
    try:
        _refuse_functions(given)
        if name in REFUSED:
            raise Refused(REFUSED[name])
        if rule is not None:
            try:
                return rule(call, *args, **kwargs)
            except Gathered:
                pass
        elif is_python and not is_running(func) and (body := opened(func)) is not None:
            with resumed(), running(func):
                return body(*args, **kwargs)
        return _of_whole(call, args, kwargs)
    except Refused as refusal:
        raise PartitionError(f"{place()}{name} {refusal}") from None


_APPLY = getattr(getattr(torch.autograd.Function.apply, "__func__", None), "__code__", None)
"""Since torch 2.14 it is of C, and has none; its context is looked for then."""


_HOOKS = torch.utils.hooks.BackwardHook._apply_on_tensors.__code__


def _refuse_functions(given: Sequence[CutTensor]) -> None:
    """Refuse what would leave autograd's graph, which is of blocks: a cut tensor inside of a
    `torch.autograd.Function`, or out of one.

    Raises:
        Refused: the reason, and the cure.
    """
    with torch._C.DisableTorchFunctionSubclass():
        is_result = any(x.requires_grad for x in given)  # of the whole: blocks have the graph
    if is_result:
        raise Refused(
            "of a tensor that is cut and came out of a torch.autograd.Function, whose backward "
            "does not reach the blocks; write it of torch's functions (checkpoints around a "
            "spatial module, too: with use_reentrant=False)"
        )
    if torch.is_grad_enabled() or not (
        saving() is not None or any(x.block.requires_grad for x in given)
    ):
        return
    codes = _codes()
    if _HOOKS in codes:
        raise Refused(
            "of a tensor that is cut, inside of what a module's full backward hook needs "
            "(register_full_backward_hook, register_full_backward_pre_hook), a "
            "torch.autograd.Function, which does not reach the blocks; give the hook to a "
            "parameter (p.register_hook), or to a module whose tensors are whole"
        )
    if _APPLY in codes or (_APPLY is None and _in_context()):
        raise Refused(
            "of a tensor that is cut, inside of a torch.autograd.Function, whose backward "
            "would not be reached; write it of torch's functions (checkpoints: with "
            "use_reentrant=False)"
        )


def _codes() -> set[CodeType]:
    """Of the functions that this thread is in."""
    found, frame = set(), inspect.currentframe()
    while frame is not None:
        found.add(frame.f_code)
        frame = frame.f_back
    return found


def _in_context() -> bool:
    """True in the forward of a `torch.autograd.Function`, by its context."""
    frame = inspect.currentframe()
    while frame is not None:
        if _has_context(frame):
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
