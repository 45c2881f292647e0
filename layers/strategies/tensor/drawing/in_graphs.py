"""Tensor-parallel nets in code that torch compiles draw no random numbers: nobody follows layouts
there, and each worker would draw its own."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from linop.backends.autograd.real_calls import broken
from linop.errors import BackendError
from linop.spaces.decomposition import REPLICATED
from linop.strategies.tensor.drawing.functions import RECURRENT, draws, is_random
from linop.strategies.tensor.following.function_call import FunctionCall


def in_words(what: str) -> str:
    """The error of something that draws."""
    return (
        f"linop: {what} of a tensor-parallel net draws random numbers, which would be other "
        f"ones on each worker in a graph: call net.eval(), set its probability to 0, or leave the "
        f"net uncompiled"
    )


def refuse(words: str) -> None:
    """Raise an error."""
    raise BackendError(words)


_UNFLATTEN = torch.Tensor.unflatten


class Undrawing(TorchFunctionMode):
    """Mode in which functions that draw are an error. torch's compiler follows it while it traces;
    it is really there only where a graph breaks."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in RANDOM:
            # The compiler knows no names of functions, and no dicts by these.
            name = next(name for one, name in RANDOM_NAMES if one is func)
            if draws(FunctionCall(name, func, args, kwargs, _whole, 1, 0)):
                words = in_words(name)
                broken(words, refuse, words)
        if func is _UNFLATTEN:  # the compiler follows it as a method alone
            x, *rest = args
            return x.unflatten(*rest, **kwargs)
        return func(*args, **kwargs)


def _whole(x: Any) -> Any:
    del x
    return REPLICATED


def _random_functions() -> dict[Any, str]:
    """Functions that may draw, without those of modules that say so themselves."""
    places = torch, torch.Tensor, torch.nn.functional, torch.nn.init
    every = ((getattr(place, name), name) for place in places for name in dir(place))
    return {
        one: name
        for one, name in every
        if is_random(name) and name not in RECURRENT and callable(one)
    }


def seen() -> bool:
    """Have torch's compiler give modes the functions that draw that it leaves out, and that eager
    calls give them. Run, and not traced."""
    from torch._dynamo.variables.torch import get_overridable_functions

    left = torch.rand_like, torch.randn_like, torch.randint_like, torch.normal
    get_overridable_functions().update(left)
    return True


setattr(seen, "_dynamo_marked_constant", True)  # noqa: B010
RANDOM_NAMES = tuple(_random_functions().items())
RANDOM = frozenset(one for one, _ in RANDOM_NAMES)
UNDRAWING = Undrawing()
