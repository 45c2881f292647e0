"""Functions along some dimensions: the others may be cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from linop.strategies.tensor.following.cuts import Cut, Refused
from linop.strategies.tensor.following.function_call import FunctionCall

Rule = Callable[[FunctionCall], Any]
ALL = None
"""All dimensions."""


def dims_of(given: Any, ndim: int) -> tuple[int, ...]:
    """Dimensions from 0 that an argument names; all for None, an empty tuple, or an argument that
    is no dimension."""
    if isinstance(given, bool) or given is None or given in ((), []):
        return tuple(range(ndim))
    if isinstance(given, int):
        return (given % max(ndim, 1),)
    if isinstance(given, tuple | list) and all(isinstance(d, int) for d in given):
        return tuple(d % max(ndim, 1) for d in given)
    return tuple(range(ndim))


def refuse_along(cut: Cut, ndim: int, what: str = "") -> None:
    """Raise for a function along the dimension that is cut."""
    raise Refused(
        f"along dimension {cut.dim - ndim}, which is split"
        + (f": {what}" if what else ": each worker would compute with its part alone")
    )


def along(number: int, default: Any = ALL, *names: str, many: bool = False) -> Rule:
    """A rule for functions along dimensions: the result keeps them, each with another length or
    not, or lacks them.

    Args:
        number: position of the argument that names them.
        default: the dimensions without it.
        names: of the argument, "dim" by default.
        many: they may be given one by one.
    """
    names = names or ("dim", "axis", "dims")

    def rule(call: FunctionCall) -> Cut:
        x, cut = call.cut_of()
        given = call.given(number, *names, default=default)
        if many and number < len(call.args):
            given = call.many(number)
        dims = dims_of(given, x.ndim)
        if cut.dim in dims:
            refuse_along(cut, x.ndim)
        lost = x.ndim - call.first.ndim
        return cut.at(cut.dim - sum(d < cut.dim for d in dims) if lost else cut.dim)

    return rule


def last(count: int) -> Rule:
    """A rule for functions of the last dimensions, of which the first argument alone is cut, as of
    pools and transforms."""

    def rule(call: FunctionCall) -> Cut:
        x, cut = call.cut_of()
        if cut.dim >= x.ndim - count:
            refuse_along(cut, x.ndim)
        return cut

    return rule


def only(dim: int) -> Rule:
    """A rule for functions of every dimension but one, as of convolutions, whose samples do not
    know of each other."""

    def rule(call: FunctionCall) -> Cut:
        x, cut = call.cut_of()
        if cut.dim != dim:
            refuse_along(cut, x.ndim)
        return cut

    return rule


def normalised(call: FunctionCall) -> Cut:
    """layer_norm and rms_norm: along the last dimensions, of a shape that is given."""
    x, cut = call.cut_of()
    shape = call.given(1, "normalized_shape", default=())
    if cut.dim >= x.ndim - (1 if isinstance(shape, int) else len(shape)):
        refuse_along(cut, x.ndim)
    return cut


def embedded(call: FunctionCall) -> Cut:
    """embedding: of indices that are cut."""
    x, cut = call.cut_of()
    if x.is_floating_point():
        raise Refused("of a table that is split; name the torch.nn.Embedding in the plan")
    return cut


def padded(call: FunctionCall) -> Cut:
    """pad: along the last dimensions, of pairs."""
    x, cut = call.cut_of()
    pairs = tuple(call.given(1, "pad", default=()))
    behind = 2 * (x.ndim - 1 - cut.dim)
    if any(pairs[behind : behind + 2]):
        refuse_along(cut, x.ndim)
    return cut


def compared(number: int, default: int) -> Rule:
    """A rule for functions of two tensors, element by element and then along a dimension, as
    cosine_similarity."""

    def rule(call: FunctionCall) -> Cut:
        from linop.strategies.tensor.following.elementwise import broadcast

        cut = broadcast(call, call.tensors)
        ndim = max(x.ndim for x in call.tensors)
        (dim,) = dims_of(call.given(number, "dim", default=default), ndim)
        if dim == cut.dim:
            refuse_along(cut, ndim)
        return cut.at(cut.dim - (dim < cut.dim))

    return rule


def extremum(call: FunctionCall) -> Any:
    """max and min: of two tensors element by element, or along a dimension."""
    from linop.strategies.tensor.following.elementwise import elementwise

    if isinstance(call.given(1, "other"), torch.Tensor):
        return elementwise(call)
    return along(1)(call)


def unreduced(call: FunctionCall) -> Any:
    """Losses element by element, without a sum."""
    from linop.strategies.tensor.following.elementwise import elementwise

    if call.kwargs.get("reduction", "mean") != "none":
        raise Refused("a sum of this worker's part alone: reduction='none' expected")
    return elementwise(call)
