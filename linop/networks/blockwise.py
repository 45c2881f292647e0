"""Functions of the blocks of tensors: each worker applies one to the blocks that it holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from linop.errors import ArgumentError, DTypeError, PartitionError, SpaceError
from linop.networks.maps import Function, Parallel, Partial
from linop.spaces.decomposition import COPIES, Axis
from linop.spaces.space import Space
from linop.spaces.tensor import TensorSpace

Partials = Callable[..., tuple[Partial, ...]]
"""The partial derivatives of a function of some regions, of which the last is the value's."""


def blockwise(
    name: str,
    arguments: Sequence[TensorSpace],
    result: TensorSpace,
    value: Callable[..., Any],
    partials: Partials,
) -> Parallel:
    """A function of the blocks of tensors that lie on one grid.

    Raises:
        PartitionError: a worker's blocks are not all on the same workers.
    """
    functions = []
    for regions in zip(*(X.regions for X in (*arguments, result)), strict=True):
        if len({r.workers for r in regions}) > 1:
            held = ", ".join(f"{r.name} on {r.workers}" for r in regions)
            raise PartitionError(
                f"{name}: blocks on different workers: {held}; bring the tensors to one grid, "
                f"replicated or in copies, by an operator such as linop.broadcast"
            )
        domain, codomain = (Space(s, result.dtype) for s in (regions[:-1], regions[-1:]))
        functions.append(Function(name, domain, codomain, value, partials(*regions)))
    return Parallel(functions, result)


def check_tensors(what: str, *tensors: object) -> None:
    """Check that arguments are tensor spaces of one dtype on one grid.

    Raises:
        ArgumentError: one is no `TensorSpace`. SpaceError: dtypes differ.
        PartitionError: the grids differ.
    """
    for X in tensors:
        if not isinstance(X, TensorSpace):
            raise ArgumentError(f"{what}: expected a TensorSpace, given {X!r}")
    spaces = [X for X in tensors if isinstance(X, TensorSpace)]
    if len({X.dtype for X in spaces}) > 1:
        raise SpaceError(f"{what}: one dtype expected, given {[X.dtype.name for X in spaces]}")
    grids = {X.partition for X in spaces}
    if len(grids) > 1:
        text = ", ".join(f"{X.name} on {X.partition!r}" for X in spaces)
        raise PartitionError(
            f"{what}: tensors on one grid expected, given {text}; bring them to one by an operator "
            f"such as linop.broadcast"
        )


def check_fractions(what: str, X: TensorSpace, scale: float | None = None) -> None:
    """Check that a tensor's dtype has fractions, or is able to hold a number.

    Raises:
        DTypeError: it is an integer dtype, and `scale` is None or no whole number.
    """
    if X.dtype.kind in "iu" and (scale is None or X.dtype.type(scale) != scale):
        number = "" if scale is None else f", which cannot hold {scale}"
        raise DTypeError(f"{what}: floating-point numbers expected, {X.name} has {X.dtype}{number}")


def roles(X: TensorSpace) -> tuple[Axis, ...]:
    """The roles of the grid axes, `COPIES` for one of length 1: there is one, whatever it does."""
    pairs = zip(X.axes, X.partition.shape, strict=True)
    return tuple(COPIES if length == 1 else axis for axis, length in pairs)


def same_layout(what: str, X: TensorSpace, Y: TensorSpace) -> None:
    """Check that two tensors have the same shape, and are divided alike.

    Raises:
        PartitionError: they are not.
    """
    if (X.global_shape, roles(X), X.bounds) != (Y.global_shape, roles(Y), Y.bounds):
        raise PartitionError(
            f"{what}: {X.name} and {Y.name} should have one shape and be divided alike; given "
            f"{X.global_shape} by {X.axes} and {Y.global_shape} by {Y.axes}"
        )
