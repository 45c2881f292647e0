"""Local work in pieces: a worker of w computes as 8 / w virtual workers would, one after the other.

Each piece is computed of the same shapes, and of dense tensors, on any number of workers. What is
a sum over workers is one over pieces first, in a binary tree: of terms in forward, and of gradients
where all pieces have one tensor. There is no code for backward: a tensor is used by two copies,
each of these by two, and so on, so that autograd adds two gradients at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from linop.errors import ArgumentError, PartitionError
from linop.spaces.region import integer
from linop.strategies.data.virtual_shards import check_tree
from linop.strategies.mesh import Axis


def pieces_of(shards: int | None, axis: Axis, name: str) -> int:
    """The number of pieces on each worker; 0 where work is not cut.

    Raises:
        ArgumentError: `shards` is no power of two that the number of workers divides, or the sums
            of their backend are no tree.
    """
    if shards is None:
        return 0
    number = integer(shards, f"{name}: shards")
    if number < 1 or number.bit_count() != 1 or number % axis.size:
        raise ArgumentError(
            f"{name}: a power of two that {axis.size} workers divide expected, given "
            f"shards={shards!r}"
        )
    check_tree(axis, name)
    return number // axis.size


def check_even(name: str, what: str, sizes: Sequence[int], pieces: int) -> None:
    """Check that pieces are of one size on all workers.

    Raises:
        PartitionError: they are not.
    """
    if len({*sizes}) > 1 or sizes[0] % pieces:
        raise PartitionError(
            f"{name}: {sum(sizes)} {what} for {pieces * len(sizes)} shards; as many for each "
            f"expected"
        )


def copies(x: Tensor, many: int) -> list[Tensor]:
    """A tensor many times, a power of two, so that gradients are added in a tree; their sum is one
    gradient of the tensor, whatever else uses it."""
    level = [x.view_as(x)]
    while len(level) < many:
        level = [one.view_as(one) for one in level for _ in range(2)]
    return level


def cut(x: Tensor, many: int, dim: int) -> list[Tensor]:
    """Dense parts of a tensor, of one size along a dimension."""
    return [part.contiguous() for part in x.split(x.shape[dim] // many, dim)]


def joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Parts as one tensor, of which each gets a gradient that is dense."""
    return torch.cat([part * 1 for part in parts], dim)


def summed(terms: Sequence[Tensor]) -> Tensor:
    """The sum of terms, a power of two, in a tree."""
    level = [*terms]
    while len(level) > 1:
        level = [a + b for a, b in zip(level[::2], level[1::2], strict=True)]
    return level[0]
