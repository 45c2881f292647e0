"""Functions that give the same elements in another shape: where the dimension that is cut goes."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from linop.strategies.tensor.following.along import dims_of, refuse_along
from linop.strategies.tensor.following.cuts import Cut, Refused
from linop.strategies.tensor.following.function_call import FunctionCall
from linop.strategies.tensor.following.sizes import Varied, values_of

_HEADS = (
    "each worker's block of dimension {dim} would not be a block of a dimension of the result; "
    "split it as (…, -1, width), with heads= in the plan for whole heads"
)


def moved(call: FunctionCall) -> Cut:
    """transpose, permute and the like: another order of the dimensions."""
    x, cut = call.cut_of()
    return cut.at(_order(call, x.ndim).index(cut.dim))


def _order(call: FunctionCall, ndim: int) -> list[int]:
    """The dimensions of the argument, in the order of the result."""
    order, name = list(range(ndim)), call.name.rstrip("_")
    if name == "permute":
        return [d % ndim for d in call.many(1, "dims")]
    if name in ("movedim", "moveaxis"):
        source = dims_of(call.given(1, "source"), ndim)
        target = dims_of(call.given(2, "destination"), ndim)
        rest = iter(d for d in order if d not in source)
        at = dict(zip(target, source, strict=True))
        return [at[d] if d in at else next(rest) for d in order]
    if name in ("T", "t", "H", "numpy_T"):
        return order[::-1]
    if name in ("mT", "mH", "adjoint"):
        one, other = -2, -1
    else:  # transpose, swapaxes, swapdims
        one, other = call.given(1, "dim0", "axis0"), call.given(2, "dim1", "axis1")
    order[one], order[other] = order[other], order[one]
    return order


def unsqueezed(call: FunctionCall) -> Cut:
    x, cut = call.cut_of()
    dim = call.given(1, "dim") % (x.ndim + 1)
    return cut.at(cut.dim + (dim <= cut.dim))


def squeezed(call: FunctionCall) -> Cut:
    """squeeze: of a cut dimension no worker may lose its block of length 1."""
    x, cut = call.cut_of()
    dims = dims_of(call.given(1, "dim"), x.ndim)
    if cut.dim in dims and 1 in (*cut.sizes, cut.whole):
        refuse_along(cut, x.ndim, "a block of length 1 would be lost")
    return cut.at(cut.dim - sum(d < cut.dim and x.shape[d] == 1 for d in dims))


def viewed(call: FunctionCall) -> Cut:
    """view and reshape."""
    x, cut = call.cut_of()
    shape = call.many(1, "size", "shape")
    if not all(isinstance(n, int) and not isinstance(n, bool) for n in shape):
        if len(shape) == 1 and isinstance(shape[0], torch.dtype):
            if shape[0].itemsize == x.dtype.itemsize:
                return cut
        raise Refused("of a dtype of another size")
    return reshaped(x, cut, shape)


def viewed_as(call: FunctionCall) -> Cut:
    """view_as and reshape_as."""
    x, other = call.given(0, "self", "input"), call.given(1, "other")
    cut = call.layout_of(x)
    if not isinstance(cut, Cut):
        raise Refused("of a tensor that is whole, as one that is split")
    return reshaped(x, cut, lengths(call, other))


def lengths(call: FunctionCall, x: Any) -> list[Any]:
    """The shape of a tensor, with the lengths of all workers."""
    found: list[Any] = list(x.shape)
    cut = call.layout_of(x)
    if isinstance(cut, Cut):
        found[cut.dim] = cut.length
    return found


def flattened(call: FunctionCall) -> Cut:
    x, cut = call.cut_of()
    shape = lengths(call, x)
    start = call.given(1, "start_dim", default=0) % x.ndim
    end = call.given(2, "end_dim", default=-1) % x.ndim
    return reshaped(x, cut, [*shape[:start], -1, *shape[end + 1 :]])


def unflattened(call: FunctionCall) -> Cut:
    x, cut = call.cut_of()
    shape, dim = lengths(call, x), call.given(1, "dim") % x.ndim
    return reshaped(x, cut, [*shape[:dim], *call.given(2, "sizes"), *shape[dim + 1 :]])


def reshaped(x: Any, cut: Cut, wanted: Sequence[Any]) -> Cut:
    """The cut of a tensor in another shape.

    Numbers of the program are those of the sequential one, in which case the whole tensor has such
    a shape too; or of this worker alone (as a number of heads that the user set), in which case it
    has not.

    Args:
        wanted: the shape, with one -1 at most.

    Raises:
        Refused: blocks of the argument are no blocks of the result, on some worker.
    """
    count, blocks = len(cut.sizes), []
    for worker, size in enumerate(cut.sizes):
        blocks.append(_shape(x, cut, size, [values_of(n, count)[0][worker] for n in wanted]))
    whole = _shape(x, cut, cut.whole, [values_of(n, count)[1] for n in wanted])
    before, after = prod(x.shape[: cut.dim]), prod(x.shape[cut.dim + 1 :])
    if None not in blocks:
        made = _place(cut, before, after, whole, blocks, wanted)
        if made is not None:
            return made
    raise Refused(f"as {tuple(map(int, wanted))}: " + _HEADS.format(dim=cut.dim - x.ndim))


def _shape(x: Any, cut: Cut, size: int, wanted: Sequence[int]) -> tuple[int, ...] | None:
    """The shape of a block, without -1; None if it has another number of elements."""
    shape = list(x.shape)
    shape[cut.dim] = size
    count, known = prod(shape), prod(n for n in wanted if n != -1)
    if -1 not in wanted:
        return tuple(wanted) if count == known else None
    if not known or count % known:
        return None
    return tuple(count // known if n == -1 else n for n in wanted)


def _place(
    cut: Cut,
    before: int,
    after: int,
    whole: tuple[int, ...] | None,
    blocks: Sequence[Any],
    wanted: Sequence[Any],
) -> Cut | None:
    """The cut of the result; None if there is none."""
    if whole is None or not any(prod(whole[:d]) == before for d in range(len(whole))):
        return _own_numbers(cut, before, after, blocks, wanted)
    differ = {d for block in blocks for d in range(len(whole)) if block[d] != whole[d]}
    if len(differ) > 1:
        return None
    for dim in differ or _candidates(whole, before, after, cut.whole, wanted):
        sizes = [(block, size) for block, size in zip(blocks, cut.sizes, strict=True)]
        if all(_fits(b, dim, before, after, n) for b, n in [*sizes, (whole, cut.whole)]):
            return Cut(dim, tuple(block[dim] for block in blocks), whole[dim], cut.index)
    return None


def _own_numbers(
    cut: Cut, before: int, after: int, blocks: Sequence[Any], wanted: Sequence[Any]
) -> Cut | None:
    """The cut in a shape with numbers of this worker alone. Where the blocks differ, -1 has to be
    the length of the cut: what it is on other workers depends on their numbers."""
    mine = blocks[cut.index]
    differ = len({*cut.sizes}) > 1 and -1 in wanted
    for dim in _candidates(mine, before, after, cut.sizes[cut.index], wanted):
        if differ and wanted[dim] != -1:
            continue
        inner = prod(mine[dim + 1 :])
        lengths = [n * after for n in (*cut.sizes, cut.whole)]
        if inner and -1 not in wanted[dim + 1 :] and not any(n % inner for n in lengths):
            *sizes, total = (n // inner for n in lengths)
            return Cut(dim, tuple(sizes), total, cut.index)
    return None


def _candidates(
    shape: Sequence[int], before: int, after: int, size: int, wanted: Sequence[Any]
) -> list[int]:
    """Dimensions of a shape that a block may be along: first that whose length follows, then those
    of several elements."""
    found = [d for d in range(len(shape)) if _fits(shape, d, before, after, size)]
    return sorted(found, key=lambda d: (wanted[d] != -1, shape[d] == 1, d))


def _fits(shape: Sequence[int], dim: int, before: int, after: int, size: int) -> bool:
    outer, inner = prod(shape[:dim]), prod(shape[dim + 1 :])
    return outer == before and shape[dim] * inner == size * after


def expanded(call: FunctionCall) -> Cut:
    """expand and broadcast_to: of dimensions of length 1; a number that differs between workers
    makes one that is cut."""
    x = call.given(0, "self", "input")
    shape = call.many(1, "size", "shape")
    first, cut = len(shape) - x.ndim, call.layout_of(x)
    varied = {d: n for d, n in enumerate(shape) if isinstance(n, Varied)}
    if isinstance(cut, Cut):
        at = cut.dim + first
        wanted, _ = values_of(shape[at], call.workers)
        others = [d for d in varied if d != at]
        same = shape[at] == -1 or wanted == cut.sizes
        if others or not same:
            refuse_along(cut, x.ndim, f"expanded to {tuple(map(int, shape))}")
        return cut.at(at)
    if len(varied) != 1:
        raise Refused("by several numbers that differ between workers")
    ((dim, number),) = varied.items()
    if dim >= first and x.shape[dim - first] != 1:
        raise Refused("of a whole tensor to a length that differs between workers")
    return cut_by(dim, number)


def cut_by(dim: int, number: Any) -> Cut:
    """A tensor of equal elements, of a length that differs between workers."""
    return Cut(dim, number.values, number.whole, number.index)


def filled(call: FunctionCall) -> Any:
    """ones, zeros, full, empty and new_ones …: of lengths that may differ between workers."""
    number = 1 if call.name.startswith("new_") else 0
    if "full" in call.name:
        shape = call.given(number, "size")
    else:
        shape = call.many(number, "size")
    shape = (shape,) if isinstance(shape, int) else shape
    varied = [d for d, n in enumerate(shape) if isinstance(n, Varied)]
    if len(varied) > 1 or len(list(call.varied_numbers())) != len(varied):
        raise Refused("of several numbers that differ between workers")
    if not varied:
        return None
    return cut_by(varied[0], shape[varied[0]])


def repeated(call: FunctionCall) -> Cut:
    """repeat and tile: not along the cut."""
    x = call.given(0, "self", "input")
    counts = call.many(1, "repeats", "dims")
    cut = call.layout_of(x)
    first = max(len(counts) - x.ndim, 0)
    counts = (1,) * (x.ndim - len(counts)) + counts
    varied = {d: n for d, n in enumerate(counts) if isinstance(n, Varied)}
    if isinstance(cut, Cut) and not varied:
        if counts[cut.dim + first] != 1:
            refuse_along(cut, x.ndim)
        return cut.at(cut.dim + first)
    if isinstance(cut, Cut) or len(varied) != 1:
        raise Refused("by several numbers that differ between workers")
    ((dim, number),) = varied.items()
    if dim >= first and x.shape[dim - first] != 1:
        raise Refused("of a whole tensor, as often as differs between workers")
    return cut_by(dim, number)


def repeated_each(call: FunctionCall) -> Cut:
    """repeat_interleave: of each element, so blocks stay blocks."""
    x, cut = call.cut_of()
    repeats, dim = call.given(1, "repeats"), call.given(2, "dim")
    if not isinstance(repeats, int) or dim is None:
        raise Refused("of all elements, or by a tensor of numbers")
    values, whole = values_of(repeats, call.workers)
    if dim % x.ndim == cut.dim:
        sizes = tuple(n * k for n, k in zip(cut.sizes, values, strict=True))
        return Cut(cut.dim, sizes, cut.whole * whole, cut.index)
    if isinstance(repeats, Varied):
        refuse_along(cut, x.ndim, "another dimension would be split too")
    return cut
