"""One call of a torch function, as rules see it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from linop.caching import cached_property
from linop.strategies.tensor.following.cuts import Cut, Followed, Refused
from linop.strategies.tensor.following.sizes import Varied, plain

_TENSOR = torch.Tensor


class FunctionCall:
    """A function, its arguments, and their layouts.

    Args:
        name: of the function.
        function: torch's.
        args, kwargs: its arguments.
        layout_of: gives the layout of a tensor; whole for one that nobody has marked.
        workers: their number.
        index: of this worker.
        is_constant: True for a whole tensor that is constant along a dimension, from the last.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        layout_of: Callable[[Tensor], Followed],
        workers: int,
        index: int,
        is_constant: Callable[[Tensor, int], bool] = lambda x, dim: False,
    ) -> None:
        self.name, self.function, self.args, self.kwargs = name, function, args, kwargs
        self.layout_of, self.workers, self.index = layout_of, workers, index
        self.is_constant = is_constant
        self.known = False
        """True if the layout of an argument is known, and so that of the result."""

    @cached_property
    def tensors(self) -> list[Tensor]:
        """All tensors among the arguments."""
        given = tree_leaves((self.args, {k: v for k, v in self.kwargs.items() if k != "out"}))
        return [x for x in given if isinstance(x, _TENSOR)]

    @cached_property
    def cuts(self) -> list[tuple[Tensor, Cut]]:
        """The tensors that are cut."""
        found = ((x, self.layout_of(x)) for x in self.tensors)
        return [(x, layout) for x, layout in found if isinstance(layout, Cut)]

    @cached_property
    def result(self) -> Any:
        """The function's result for this worker's blocks; computed when it is asked for."""
        args, kwargs = tree_map(_plain, (self.args, self.kwargs))
        return self.function(*args, **kwargs)

    @property
    def first(self) -> Tensor:
        """The first tensor of the result."""
        return next(x for x in tree_leaves(self.result) if isinstance(x, _TENSOR))

    def fits(self, x: Tensor, behind: int, cut: Cut) -> bool:
        """True for a whole tensor that is the same for every block of a cut.

        Args:
            behind: the dimension of the cut, from the last.
        """
        if x.ndim < -behind or x.shape[behind] == 1:
            return True
        return x.shape[behind] == cut.sizes[cut.index] and self.is_constant(x, behind)

    def given(self, number: int, *names: str, default: Any = None) -> Any:
        """An argument by its position, or one of its names."""
        if number < len(self.args):
            return self.args[number]
        return next((self.kwargs[name] for name in names if name in self.kwargs), default)

    def many(self, number: int, *names: str) -> Any:
        """Arguments that may be given one by one or as one tuple: from a position on."""
        rest: tuple[Any, ...] = self.args[number:]
        if not rest:
            rest = tuple(self.kwargs[name] for name in names if name in self.kwargs)
        if len(rest) == 1 and isinstance(rest[0], tuple | list):
            return tuple(rest[0])
        return tuple(rest)

    def cut_of(self, number: int = 0, *names: str) -> tuple[Tensor, Cut]:
        """The argument at a position, the only one that may be cut.

        Raises:
            Refused: others are.
        """
        x = self.given(number, *(names or ("input", "self")))
        cut = self.layout_of(x) if isinstance(x, _TENSOR) else None
        if not isinstance(cut, Cut) or any(y is not x for y, _ in self.cuts):
            raise Refused("another of its arguments is split")
        return x, cut

    def varied_numbers(self) -> Iterator[Varied]:
        """Numbers among the arguments that differ between workers."""
        yield from _varied((self.args, self.kwargs))


def _varied(given: Any) -> Iterator[Varied]:
    if isinstance(given, Varied):
        yield given
    elif isinstance(given, slice):
        yield from _varied((given.start, given.stop, given.step))
    elif isinstance(given, tuple | list):
        for one in given:
            yield from _varied(one)
    elif isinstance(given, dict):
        yield from _varied(tuple(given.values()))


def _plain(given: Any) -> Any:
    if isinstance(given, slice):
        return slice(plain(given.start), plain(given.stop), plain(given.step))
    return plain(given)
