"""Layouts of split tensors that objects keep between calls of a net, as the keys and values in a
cache: by the place in the object, so that another tensor there, as that of reordered or cropped
rows, has the layout of the one before."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from linop.strategies.tensor.following.cuts import Cut

_DEEPEST = 4
"""Levels of objects in each other, as a cache, its layers, a layer, its keys."""
Place = tuple[Any, ...]


class Kept:
    """Places of objects, and the layouts of the tensors that were there when a call ended."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Any], dict[Place, Cut]]] = {}

    def __deepcopy__(self, memo: object) -> Kept:
        return Kept()

    def note(self, leaves: Iterable[Any], layouts: Mapping[Tensor, Cut]) -> None:
        """Note what objects have after a call.

        Args:
            leaves: arguments and results, of which some are objects.
            layouts: of split tensors.
        """
        self._known = {key: kept for key, kept in self._known.items() if kept[0]() is not None}
        for one in leaves:
            found = {place: layouts[x] for place, x in _inside(one) if x in layouts}
            self._known.pop(id(one), None)
            if found and hasattr(type(one), "__weakref__"):
                self._known[id(one)] = weakref.ref(one), found

    def layouts(self, leaves: Iterable[Any]) -> Iterator[tuple[Tensor, Cut]]:
        """Tensors that objects have where they had split ones, whose length there is a block's and
        not that of a whole tensor, with their layouts."""
        for one in leaves:
            known, places = self._known.get(id(one), (None, {}))
            if known is None or known() is not one:
                continue
            for place, x in _inside(one):
                cut = places.get(place)
                if cut is None or x.ndim <= cut.dim:
                    continue
                block = cut.sizes[cut.index]
                if x.shape[cut.dim] == block and (block != cut.whole or len(cut.sizes) == 1):
                    yield x, cut


def _inside(one: Any) -> Iterator[tuple[Place, Tensor]]:
    """Tensors in an object that is no tensor, with their places."""
    kind: Any = type(one)
    if not is_configuration(kind):
        return
    found: list[tuple[Place, Any]] = [((), one)]
    for _ in range(_DEEPEST):
        inner: list[tuple[Place, Any]] = []
        for place, other in found:
            for name, value in _items(other):
                if isinstance(value, torch.Tensor):
                    yield (*place, name), value
                else:
                    inner.append(((*place, name), value))
        found = inner


def tensors_of(one: Any) -> Iterator[Tensor]:
    """Tensors in an object that is no tensor."""
    return (x for _, x in _inside(one))


def _items(one: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(one, list | tuple):
        return enumerate(one)
    if isinstance(one, dict):
        return one.items()
    kind: Any = type(one)
    return vars(one).items() if is_configuration(kind) else ()


@cache
def is_configuration(kind: type) -> bool:
    """True for objects with attributes that are no tensors, no functions and no modules."""
    others = torch.Tensor | FunctionType | torch.nn.Module
    return bool(kind.__dictoffset__) and not issubclass(kind, others | type)
