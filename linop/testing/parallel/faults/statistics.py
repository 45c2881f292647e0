"""Statistics that each rank takes of its own elements, where the twin takes them of all."""

from __future__ import annotations

import numpy as np

from linop.testing.parallel.faults.context import Context
from linop.testing.parallel.recording.records import FORWARD, Call
from linop.testing.parallel.twins.locations import BLOCKS, TERMS, uses
from linop.testing.parallel.twins.relations import Scale

NEAR = 12
"""Calls behind one in which its result, summed or gathered, is looked for."""


def own_statistics(context: Context, call: Call, theirs: Call) -> bool:
    """True if results are, channel by channel, a multiple of the arguments and a constant, as the
    twin's are, but other ones on each rank."""
    given = next(
        (n for n in call.inputs if not context.twin.tensors[n].parameter and varied(context, n)),
        -1,
    )
    if given < 0 or not call.outputs:
        return False
    x, y = (context.twin.tensors[n].value for n in (given, call.outputs[0]))
    if x is None or y is None or x.shape != y.shape:
        return False
    for axis in range(1, x.ndim) if x.ndim > 1 else ():
        if not _is_affine(x, y, axis, context.locations.values):
            continue
        for one in context.locations.all:
            if one.matched or not theirs.number <= one.order <= theirs.number + 2 * NEAR:
                continue
            for rank, tensor in context.locations.tensors(one).items():
                source = _argument_of(context, rank, given, tensor.value)
                if source is not None and tensor.value is not None:
                    if _is_affine(source, tensor.value, axis, context.locations.values):
                        return True
    return False


_REDUCING = (
    "mean",
    "sum",
    "var",
    "std",
    "norm",
    "softmax",
    "logsumexp",
    "max",
    "min",
    "div",
    "cov",
)
"""Parts of the names of functions whose results depend on all elements of a dimension, or divide by
what does."""


def of_own_elements(context: Context, call: Call, theirs: Call) -> bool:
    """True if a statistic is taken of a block or term, where the twin takes it of the whole."""
    if not any(part in theirs.name for part in _REDUCING):
        return False
    for one in context.locations.all:
        used = any(n in theirs.inputs for n in one.numbers.values())
        if used and one.order <= theirs.number and one.form in (BLOCKS, TERMS):
            if not context.twin.tensors[one.twin].parameter:
                return True
    return False


def _argument_of(
    context: Context, rank: int, number: int, like: np.ndarray | None
) -> np.ndarray | None:
    """A rank's part of a tensor of the twin, of a given shape."""
    for one in context.locations.all:
        if one.twin == number and rank in one.numbers and like is not None:
            value = context.locations.tensors(one)[rank].value
            if value is not None and value.shape == like.shape:
                return value
    return None


def _is_affine(x: np.ndarray, y: np.ndarray, axis: int, scale: Scale) -> bool:
    """True if y is a multiple of x and a constant, for each index of an axis."""
    rows, results = (np.moveaxis(one, axis, 0).reshape(one.shape[axis], -1) for one in (x, y))
    if rows.shape[1] < 3 or np.ptp(rows, axis=1).min() <= scale.least:
        return False
    means = rows.mean(1, keepdims=True), results.mean(1, keepdims=True)
    slopes = ((rows - means[0]) * (results - means[1])).sum(1, keepdims=True)
    slopes = slopes / ((rows - means[0]) ** 2).sum(1, keepdims=True)
    return scale.near(means[1] + slopes * (rows - means[0]), results)


def varied(context: Context, number: int) -> bool:
    """True for floating-point tensors of more than one element that are not all equal."""
    value = context.twin.tensors[number].value
    if value is None or value.dtype.kind not in "fc" or value.size < 2:
        return False
    return bool((value != value.flat[0]).any())


# Single numbers

_LINEAR = {"add", "add_", "sub", "neg", "div", "detach", "clone", "to", "reshape", "view",
           "squeeze", "unsqueeze", "__add__", "__radd__", "__truediv__", "__sub__",
           "__rsub__"}  # fmt: skip


def of_single_numbers(context: Context) -> tuple[Call, Call] | None:
    """A call of the twin's that makes one number of a tensor, such as a mean, by which the loss is
    no linear function of it, and the call of a rank that makes one of its block alone; None if
    there is none. A loss that is a mean of ranks' losses is right in a number in which it is
    linear, and wrong in others."""
    for call in context.twin.calls:
        if call.phase != FORWARD or call.inside >= 0 or len(call.outputs) != 1:
            continue
        value = context.twin.tensors[call.outputs[0]].value
        if value is None or value.size != 1 or not any(one in call.name for one in _REDUCING):
            continue
        if _is_linear(context, call.outputs[0]):
            continue
        for number in call.inputs:
            found = _of_blocks(context, number, call.name)
            if found is None:
                continue
            numbers = np.array([each for _, each in found.values()])
            near = context.locations.values.near
            theirs = np.array(float(value.ravel()[0]))
            together = near(numbers.mean(), theirs) or near(numbers.sum(), theirs)
            if together and not near(numbers[0], theirs):
                return call, found[min(found)][0]
    return None


def _is_linear(context: Context, number: int) -> bool:
    """True if the loss is a linear function of a number, as far as it is known."""
    used = uses(context.twin)
    waiting, done = [number], {number}
    while waiting:
        for call in used.get(waiting.pop(), ()):
            if call.name == "grad":
                continue  # a derivative of the number: none of its value
            if call.name not in _LINEAR and not (call.name in ("mul", "__mul__", "__rmul__")
                                                 and len(call.inputs) == 1):  # fmt: skip
                return False
            waiting += [one for one in call.outputs if one not in done]
            done.update(call.outputs)
    return True


def _of_blocks(context: Context, number: int, name: str) -> dict[int, tuple[Call, float]] | None:
    """By rank, the call of a name that makes a number of the rank's block of a tensor of the
    twin's, and the number; None if a rank has none, or sums it with others'."""
    found: dict[int, tuple[Call, float]] = {}
    for rank, record in context.ranks.items():
        for call in record.calls:
            if call.name != name or call.phase != FORWARD or len(call.outputs) != 1:
                continue
            at = [context.locations.at.get((rank, n)) for n in call.inputs]
            value = record.tensors[call.outputs[0]].value
            if value is None or value.size != 1:
                continue
            if any(one is not None and one.twin == number and one.form == BLOCKS for one in at):
                found[rank] = call, float(value.ravel()[0])
                break
        else:
            return None
        mine = found[rank][1]
        for moved in record.collectives:
            if moved.value is not None and moved.value.size == 1 and moved.phase == FORWARD:
                if float(moved.value.ravel()[0]) == mine:
                    return None
    return found
