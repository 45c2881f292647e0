"""Functions that graphs of torch's compiler keep as calls: of real tensors, at each run of the
graph. Such are draws of random numbers, checks of values, and local compute that torch's tracers
cannot follow. In eager calls they are plain calls.

This module does not import torch's compiler; `linop.backends.autograd.traced` makes their nodes.
"""

from __future__ import annotations

import inspect
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

Form = tuple[Any, ...]
"""Shape and dtype of a tensor; then its layout or its device, if that is another one than of the
first argument."""


class RealCall:
    """A function of real tensors, as graphs know it.

    Attributes:
        function: takes tensors, and returns a sequence of new ones, none of them an argument.
        results: shape and dtype of each result.
        derivative: function of the arguments, the results and their gradients, all in one list, to
            gradients of the first arguments, and their forms; None: results have no gradient.
        plainly: what is called in its place with values and with gradients, as by exported
            programs: a function in torch's autograd. None: the derivative is used there, too.
        number: by which graphs of this process know it.
    """

    def __init__(
        self,
        function: Callable[..., Sequence[Tensor]],
        results: Sequence[Form],
        derivative: RealCall | None = None,
        plainly: Callable[..., Sequence[Tensor]] | None = None,
    ) -> None:
        self.function, self.results, self.derivative = function, tuple(results), derivative
        self.plainly = plainly
        self.number = next(_numbers)
        _CALLS[self.number] = self


class _Key(NamedTuple):
    function: Any
    results: tuple[Form, ...]


class _Calls(dict[_Key, RealCall]):
    """Calls that an object keeps. A copy is empty: functions refer to the object, and not to its
    copy."""

    def __deepcopy__(self, memo: object) -> _Calls:
        return _Calls()

    def __reduce__(self) -> Any:
        return _Calls, ()


def really(
    owner: Any,
    function: Callable[..., Sequence[Tensor]],
    results: Sequence[Form],
    *tensors: Tensor,
    derivative: tuple[Callable[..., Sequence[Tensor]], Sequence[Form]] | None = None,
    plainly: Callable[..., Sequence[Tensor]] | None = None,
) -> Sequence[Tensor]:
    """``function(*tensors)``; a node that calls it, while torch traces a graph.

    Args:
        owner: keeps the function as long as it lives itself, and so should the graph's module.
        function, results, derivative, plainly: as of `RealCall`.
    """
    if not is_tracing():
        return function(*tensors)
    from linop.backends.autograd.traced import called

    kept: _Calls = owner.__dict__.setdefault("_real_calls", _Calls())
    key = _Key(function, tuple(results))
    known = kept.get(key)
    if known is None:
        back = None if derivative is None else RealCall(*derivative)
        known = kept[key] = RealCall(function, key.results, back, plainly)
    return called(known, tensors)


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a function that makes layers or operators: run, and not traced, if torch
    traces."""
    if not traces():
        return function(*arguments)
    from linop.backends.autograd.traced import untraced

    return untraced(function, *arguments)


def broken(words: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a function outside of graphs, in code that torch compiles: a graph break.

    Args:
        words: reason, which errors of ``fullgraph=True`` have.
    """
    from torch._dynamo import graph_break

    graph_break(msg=words)
    return _plainly(function, *arguments)


@_disable_dynamo
def _plainly(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


def traces() -> bool:
    """True while torch traces in this thread."""
    if not torch._C._len_torch_dispatch_stack():
        return False
    modes = torch._C._TorchDispatchModeKey
    each = modes.FAKE, modes.PROXY, modes.FUNCTIONAL
    return any(torch._C._get_dispatch_mode(mode) is not None for mode in each)


def call_of(number: int) -> RealCall | None:
    """The call that a graph knows by a number; None if it is gone."""
    return _CALLS.get(number)


class _Local(threading.local):
    traces = False
    anchor: Tensor | None = None


LOCAL = _Local()
"""Of this thread: True while a function is run by torch's tracers; and the anchor of its nodes."""


def by_autograd(
    function: Callable[..., Sequence[Tensor]], inputs: int = 1
) -> Callable[..., Sequence[Tensor]]:
    """The derivative of a `RealCall`, by torch's autograd of the function, which is computed again.

    Args:
        inputs: the number of first arguments that have gradients.
    """

    def derivative(*tensors: Tensor) -> Sequence[Tensor]:
        count = len(inspect.signature(function).parameters)
        results = (len(tensors) - count) // 2
        given = [x.detach().requires_grad_() for x in tensors[:inputs]]
        with torch.enable_grad():
            found = function(*given, *tensors[inputs:count])
        return torch.autograd.grad(found, given, tensors[count + results :])

    return derivative


def is_tracing() -> bool:
    """True inside of a function that torch's tracers run, with tensors without values."""
    return LOCAL.traces


@contextmanager
def tracing(traces: bool = True) -> Iterator[None]:
    """Context in which `really` makes nodes."""
    before, LOCAL.traces = LOCAL.traces, traces
    try:
        yield
    finally:
        LOCAL.traces = before


FUNCTIONS: dict[str, Callable[..., Any]] = {}
"""Functions that code which torch compiles calls by name."""


_numbers = itertools.count()
_CALLS: weakref.WeakValueDictionary[int, RealCall] = weakref.WeakValueDictionary()
