"""A pipeline's batch: arguments of the first stage, which of their tensors are cut among
micro-batches, and results of micro-batches that are joined again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate
from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linop.errors import ArgumentError
from linop.strategies.pipelines.forms import Form, form_of, members, of_call, rebuilt

BatchDims = Mapping[int | str, int | None]
"""The batch's dimension of inputs, by their place or name; None: they are not cut."""


class Given(NamedTuple):
    """A value that a worker gives, as tensors.

    Attributes:
        form: None: it is a tensor, or arguments that are tensors by position.
        wrong: reason why it cannot be taken; empty if it can.
    """

    form: Form | None
    tensors: Sequence[Any]
    wrong: str = ""


NOTHING = Given(None, ())


def arguments_of(x: Any, named: Mapping[str, Any]) -> Given:
    """Arguments of the first stage.

    Args:
        x: one by position, several in a tuple, or those by name in a mapping.
        named: others by name.
    """
    if not named and (x is None or isinstance(x, torch.Tensor)):
        return Given(None, (x,))
    by_name = {**x, **named} if isinstance(x, Mapping) else named
    by_place = x if type(x) is tuple else () if x is None or isinstance(x, Mapping) else (x,)
    tensors: list[Tensor] = []
    try:
        forms = [form_of(one, tensors, f"input {k}") for k, one in enumerate(by_place)]
        own = {str(k): form_of(one, tensors, f"input {k!r}") for k, one in by_name.items()}
    except ArgumentError as error:
        return Given(None, (), str(error))
    if not tensors:
        return Given(None, (), f"a tensor expected in the input, given {type(x)}")
    return Given(of_call(forms, own), tensors)


def target_of(target: Any) -> Given:
    """A target: a tensor, or a structure of several."""
    if target is None or isinstance(target, torch.Tensor):
        return Given(None, (target,))
    tensors: list[Tensor] = []
    try:
        form = form_of(target, tensors, "target")
    except ArgumentError as error:
        return Given(None, (), str(error))
    return Given(form, tensors, "" if tensors else f"{type(target).__name__} given")


def dims_checked(given: Any) -> tuple[tuple[int | str, int | None], ...]:
    """The option `batch_dims`, for comparison with that of other workers.

    Raises:
        ArgumentError: it is no mapping from places or names to dimensions or None.
    """
    if given is None:
        return ()
    try:
        found = tuple((key, None if d is None else index(d)) for key, d in given.items())
        wrong = not all(isinstance(key, str | int) for key, _ in found)
    except Exception:  # of whatever the user gives
        found, wrong = (), True
    if wrong:
        raise ArgumentError(
            f"batch_dims: a dict expected, from places or names of inputs to the batch's dimension "
            f"of their tensors, or to None for what is the same for all micro-batches; given "
            f"{given!r}"
        )
    return found


def named(owner: int | str) -> str:
    """An input, in words."""
    return f"input {owner!r}"


def dimensions(
    owners: Sequence[int | str], shapes: Sequence[Sequence[int]], given: BatchDims
) -> tuple[int, list[int | None]]:
    """The number of rows of the batch, and each tensor's dimension of that size; None for one that
    is not cut. Dimensions that are not given are the first, of tensors that have as many rows as
    the first one that is cut.

    Args:
        owners: the input that each tensor is in.
        shapes: of the tensors.

    Raises:
        ArgumentError: `given` names no input, or a dimension that has another size; or nothing is
            to be cut.
    """
    unknown = [key for key in given if key not in owners]
    if unknown:
        raise ArgumentError(
            f"batch_dims: there is no input {unknown[0]!r} with a tensor; this call has "
            f"{', '.join(map(repr, dict.fromkeys(owners)))} (numbers by position, names by name)"
        )
    rows, first = 0, ""
    dims: list[int | None] = []
    for owner, shape in zip(owners, shapes, strict=True):
        d = given.get(owner, 0)
        if d is not None and not -len(shape) <= d < len(shape):
            if owner in given:
                raise ArgumentError(
                    f"batch_dims: {named(owner)} has the shape {tuple(shape)}, and no dimension {d}"
                )
            d = None
        if d is not None and not first:
            rows, first = shape[d], named(owner)
        if d is not None and shape[d] != rows:
            if owner in given:
                raise ArgumentError(
                    f"Pipeline: {named(owner)} of shape {tuple(shape)} cannot be cut among the "
                    f"micro-batches along dimension {d}, which batch_dims gives: {rows} rows "
                    f"expected, as {first} has; batch_dims={{{owner!r}: None}} leaves it whole"
                )
            d = None
        dims.append(d if d is None else d % len(shape))
    if not first:
        raise ArgumentError(
            "Pipeline: no input is cut among the micro-batches: a tensor with the batch's "
            "dimension expected, which is the first one, or that of batch_dims"
        )
    return rows, dims


class Cut:
    """Tensors of each micro-batch, made when they are asked for: the first one's forward does not
    wait for the others.

    Args:
        tensors: of the batch.
        dims: along which they are cut; None for one that is not.
        sizes: of micro-batches.
    """

    def __init__(
        self, tensors: Sequence[Any], dims: Sequence[int | None], sizes: Sequence[int]
    ) -> None:
        self._tensors = [(x.detach(), d) for x, d in zip(tensors, dims, strict=True)]
        self._sizes, self._starts = sizes, list(accumulate(sizes, initial=0))

    def __call__(self, m: int) -> list[Tensor]:
        start, size = self._starts[m], self._sizes[m]
        return [x if d is None else x.narrow(d, start, size) for x, d in self._tensors]


def targets_cut(given: Given, sizes: Sequence[int]) -> Sequence[Any]:
    """The target of each micro-batch."""
    if given.form is None:
        (target,) = given.tensors
        return [None] * len(sizes) if target is None else target.detach().split_with_sizes(sizes)
    some = Cut(given.tensors, [0] * len(given.tensors), sizes)
    return [rebuilt(given.form, some(m)) for m in range(len(sizes))]


def joined(results: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Results of micro-batches as that of the batch, in tuples and dicts: the rows of tensors that
    have some, in their first dimension, numbers one after the other, and of others that are all
    equal the first.

    Raises:
        ArgumentError: others differ, or the structures do.
    """
    first = results[0]
    if len({isinstance(one, torch.Tensor) for one in results}) > 1:
        raise _differing("values of several kinds", results)
    if isinstance(first, torch.Tensor):
        return _joined(results, sizes)
    inner = members(first)
    if inner is None:
        if not all(map(partial(_is_equal, first), results)):
            raise _differing("objects that differ", results)
        return first
    each = [members(one) or {} for one in results]
    if any([*one] != [*inner] for one in each):
        raise _differing("values of several structures", results)
    values = [joined([one[key] for one in each], sizes) for key in inner]
    return (
        tuple(values) if isinstance(first, tuple | list) else dict(zip(inner, values, strict=True))
    )


def _is_equal(one: Any, other: Any) -> bool:
    try:
        same = one == other
        return one is other or bool(same.all() if hasattr(same, "all") else same)
    except Exception:  # of whatever the user's class does, as arrays do
        return False


def _differing(what: str, results: Sequence[Any]) -> ArgumentError:
    words = [repr(one)[:40] for one in results[:3]]
    return ArgumentError(
        f"Pipeline: the last stage returns {what} for the micro-batches: {', '.join(words)}"
        f"{', …' if len(results) > 3 else ''}; tensors expected, or what is the same for all, to "
        f"make one result of them: return numbers as tensors, and no caches (use_cache=False, of "
        f"transformers in the model's configuration)"
    )


def _joined(results: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    first = results[0]
    if not first.ndim:
        return torch.stack(list(results))
    if all(x.ndim and x.shape[0] == n for x, n in zip(results, sizes, strict=False)):
        return torch.cat(list(results))
    if any(x.shape != first.shape or not torch.equal(x, first) for x in results):
        raise ArgumentError(
            f"Pipeline: the last stage returns tensors of shapes "
            f"{[tuple(x.shape) for x in results]} for micro-batches of {list(sizes)} rows; as many "
            f"rows expected, or the same tensor for all, to make one result of them; rows are in "
            f"the first dimension, whichever it is in inputs, of batch_dims"
        )
    return first
