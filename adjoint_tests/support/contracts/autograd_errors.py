"""Errors of `linop.autograd`, raised on all workers: contracts as in
`support.contracts.autograd`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

import linop
from linop import Partition, TensorSpace
from linop.backends import Backend
from linop.errors import (
    ArgumentError,
    BackendError,
    DTypeError,
    LinopError,
    RegionError,
    ShapeError,
)
from support.contracts.autograd import apply, passes_in_any_common_order, works
from support.contracts.plans import mine, raised, size, total


def bad_tensors(worker: int) -> dict[str, tuple[Callable[[Any], Any], type[LinopError], str]]:
    """A wrong argument of one worker, made of the right one; the error, and words of it."""
    return {
        "dtype": (lambda x: x.float(), DTypeError, "torch.float32 given, torch.float64 expected"),
        "shape": (lambda x: x[1:], ShapeError, "(4,) given, (5,) expected"),
        "sparse": (lambda x: x.to_sparse(), ArgumentError, "layout torch.sparse_coo given"),
        "device": (lambda x: x.to("meta"), ArgumentError, "on device meta"),
        "array": (lambda x: x.numpy(), ArgumentError, "ndarray given, torch.Tensor expected"),
        "list": (lambda x: x.tolist(), ArgumentError, "list given, torch.Tensor expected"),
        "none": (lambda x: None, ArgumentError, f"worker {worker}: None given"),
        "name": (lambda x: {"z": x}, RegionError, "unknown region 'z'"),
        "missing": (lambda x: {}, RegionError, "no array for the regions"),
    }


def bad_tensors_fail_everywhere(backend: Backend, what: str, odd: int, later: bool) -> None:
    """All workers raise the error of the one whose tensor is wrong, before or without waiting."""
    n, me = size(backend), mine(backend)
    op = total(n)
    good = torch.ones(5, dtype=torch.float64)
    change, kind, words = bad_tensors(odd)[what]
    if later:
        apply(op, good, backend)
    text = raised(kind, lambda: apply(op, change(good) if me == odd else good, backend))
    assert words in text, text
    works(total(n), backend)
    if not later:  # nothing had begun
        works(op, backend)


def inactive_workers_pass_nothing(backend: Backend) -> None:
    """An argument of a worker without a region is an error of all as well."""
    n = size(backend)
    op = linop.broadcast(TensorSpace((5,), Partition((1,), [0])), Partition((n,)))
    x = torch.ones(5, dtype=torch.float64)
    text = raised(ArgumentError, lambda: apply(op, x, backend))
    assert "holds no region here; pass None or a zero-volume tensor, not a tensor of" in text, text
    works(op, backend)


def passes_that_cross_are_told(backend: Backend) -> None:
    """Two passes of one operator in different orders do not mix gradients: they are an error, even
    of workers that would not have to wait."""
    n, me = size(backend), mine(backend)
    op = total(n)
    ys = [apply(op, torch.ones(5, dtype=torch.float64), backend) for _ in range(3)]
    text = raised(BackendError, lambda: ys[0 if me else 1].sum().backward())
    assert "workers call different plans: worker 0 calls call 2 of plan" in text, text


def a_pass_that_crosses_with_the_last_call(backend: Backend) -> None:
    """The same, where one of them has nothing to ask: found by who waits in vain."""
    me = mine(backend)
    op = total(size(backend))
    works(op, backend)
    ys = [apply(op, torch.ones(5, dtype=torch.float64), backend) for _ in range(2)]
    ys[0 if me else 1].sum().backward()


def debug_mode_tells_of_crossed_passes(backend: Backend) -> None:
    """At once, too."""
    backend.debug = True  # type: ignore[attr-defined]
    passes_in_any_common_order(backend)
    text = raised(BackendError, lambda: a_pass_that_crosses_with_the_last_call(backend))
    assert "worker 0 calls call 3 of plan" in text and "worker 1 calls call 2 of" in text, text


def changed_results_are_not_repeated(backend: Backend) -> None:
    """A result that was changed in place cannot be given again."""
    op = total(size(backend))

    def layer(x: Any) -> Any:
        return torch.sin(apply(op, x, backend).mul_(2))

    x = torch.ones(5, dtype=torch.float64, requires_grad=True)
    y = checkpoint(layer, x, use_reentrant=False, context_fn=linop.autograd.checkpoint_context)
    assert "changed in place" in raised(BackendError, lambda: y.sum().backward())


CONTRACTS: tuple[tuple[Callable[..., None], tuple[Any, ...]], ...] = (
    (passes_that_cross_are_told, ()),
    (debug_mode_tells_of_crossed_passes, ()),
    (changed_results_are_not_repeated, ()),
    (inactive_workers_pass_nothing, ()),
)
"""Each with its arguments."""
