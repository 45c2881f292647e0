"""Tensors that are cut over a grid: torch's functions of them run by rules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linop.errors import PartitionError
from linop.strategies.space.grid import Grid
from linop.strategies.space.layout import Layout, in_words


class CutTensor(torch.Tensor):
    """A tensor of which each worker has a block. ``shape`` and the other properties are those of
    the whole tensor; torch's functions of it are computed block by block, by all workers.

    Attributes:
        block: this worker's block, a plain tensor.
        blocks: its layout, which dimensions are cut, and where.
        grid: the workers.
        is_copy: True for the result of a function that gives a view in torch, where blocks had to
            be moved; it cannot be changed in place.

    Example:
        Functions of torch go on with it. Its shape is that of the whole image, its block one half:

        >>> image = torch.arange(16.0).view(1, 1, 4, 4)
        >>> def program(backend):
        ...     net = strategies.spatial(torch.nn.ReLU(), strategies.Mesh(x=2)["x"], dims=[2])
        ...     y = 2 * net(image)
        ...     return tuple(y.shape), tuple(y.block.shape), torch.equal(y.whole(), 2 * image)
        >>> linop.launch(program, workers=2)
        [((1, 1, 4, 4), (1, 1, 2, 4), True), ((1, 1, 4, 4), (1, 1, 2, 4), True)]
    """

    block: Tensor
    blocks: Layout
    grid: Grid
    is_copy: bool

    @staticmethod
    def __new__(cls, block: Tensor, layout: Layout, grid: Grid) -> CutTensor:
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls, layout.shape, dtype=block.dtype, device=block.device
        )
        made.block, made.blocks, made.grid, made.is_copy = block, layout, grid, False
        return made  # type: ignore[no-any-return]

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def whole(self) -> Tensor:
        """The whole tensor, on every worker. Collective."""
        return self.grid.move(self.block, self.blocks, self.grid.whole(self.blocks.shape))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"CutTensor({in_words(self.blocks)}, {self.block.dtype})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        from linop.strategies.space.dispatch import computed

        return computed(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        from linop.strategies.space.places import place

        raise PartitionError(
            f"{place()}{func} of a tensor that is cut, inside of code that torch compiled (a "
            f"script of torch.jit, a custom operator), where functions are not followed. Write it "
            f"in Python, or compute it of the whole tensor, x.whole()"
        )


def wrapped(block: Tensor, layout: Layout, grid: Grid) -> Any:
    """A cut tensor; the plain one, if every worker has all of it."""
    return block if layout.is_whole else CutTensor(block, layout, grid)
