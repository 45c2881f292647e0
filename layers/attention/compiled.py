"""Calls of `linop.layers.scaled_dot_product_attention` in code that torch compiles: its arguments
as texts and numbers, which graphs take."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor

from linop.backends import Backend, use
from linop.backends.autograd.functions import hindrance
from linop.backends.autograd.real_calls import FUNCTIONS, broken
from linop.layers.attention.attention import attended
from linop.spaces.decomposition import Role
from linop.spaces.partition import Partition

_NAME = "scaled_dot_product_attention"


def compiled_attention(where: str, *arguments: Any) -> Tensor:
    """A call in code that torch compiles.

    Args:
        where: `place_of` the backend; empty for the current one.
        arguments: those of `scaled_dot_product_attention`, in its order.
    """
    why = hindrance()
    if why:
        words = f"linop: attention is not part of graphs: {why}"
        return broken(words, _uncompiled, where, arguments)  # type: ignore[no-any-return]
    from linop.backends.autograd.traced import followed_function

    *given, P_x, x_axes, method, zigzag, window = arguments
    # Graphs take texts and numbers.
    grid = " ".join([str(n) for n in P_x.shape]), " ".join([str(n) for n in P_x.workers])
    axes = None
    if x_axes is not None:
        axes = " ".join([str(k) if isinstance(k, int) else k.value for k in x_axes])
    rest = *grid, axes, method, zigzag, window
    found: Tensor = followed_function(_NAME, where, *given, *rest)
    return found


def _followed(where: str, *arguments: Any) -> Tensor:
    shape, workers, axes, method, zigzag, window = arguments[-6:]
    P_x = Partition([int(n) for n in shape.split()], [int(n) for n in workers.split()])
    known = {role.value: role for role in Role}
    x_axes = None if axes is None else [known.get(k) or int(k) for k in axes.split()]
    with _at(where):
        last = {"P_x": P_x, "x_axes": x_axes, "method": method, "zigzag": zigzag, "window": window}
        return attended(*arguments[:-6], **last)


def _uncompiled(where: str, arguments: Sequence[Any]) -> Tensor:
    with _at(where):
        return attended(*arguments)


FUNCTIONS[_NAME] = _followed
_PLACES: WeakValueDictionary[str, Backend] = WeakValueDictionary()


def place_of(backend: Backend) -> str:
    """A text by which compiled code knows a backend."""
    place = f"backend {id(backend)}"
    _PLACES[place] = backend
    return place


def _at(where: str) -> AbstractContextManager[Any]:
    return use(_PLACES[where]) if where else nullcontext()
