"""Gradient clipping by the norm of all gradients of a distributed model, each counted once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import reduce
from math import isclose, isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linop.errors import ArgumentError, BackendError
from linop.layers.agreement.input_agreement import program_backend
from linop.layers.parameters.blocks import blocks
from linop.layers.parameters.groups import Groups, groups_of

Key = str | int | None


class Norm(NamedTuple):
    """Norm of some gradients of one worker."""

    key: Key
    """Key of a parameter that each worker holds whole, or each of some groups; None for the
    worker's blocks together."""
    value: float
    dtype: Any
    shape: tuple[int, ...] = ()
    at: tuple[int | None, ...] = ()
    """This worker's numbers in the groups that cut the parameter, of which others have copies; None
    for other groups."""


def clip_grad_norm_(
    parameters: Any,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Clip the norm of the gradients of a distributed model, as `torch.nn.utils.clip_grad_norm_`
    does that of the sequential one. Collective.

    Every element counts once, whether split into blocks, replicated or held whole by all workers:
    those of the current backend, or of the groups that parameters are cut over. Gradients are
    changed in place.

    Args:
        parameters: the model, whose parameters have names; or parameters, in which those of plain
            modules come in one order on all workers.
        max_norm, norm_type, error_if_nonfinite, foreach: as in torch; no norm_type of 0.

    Returns:
        The norm of all gradients: the same on every worker.

    Raises:
        BackendError: a plain module's gradient differs between workers, as it does where each has
            computed with its block alone; or the norm is not finite, if that is asked for.
            ArgumentError: norm_type is 0. All on every worker.

    Example:
        >>> P, x = linop.Partition((1, 2)), torch.tensor([[3.0, 4.0]])
        >>> def main(backend):
        ...     linear = layers.Linear(P, 2, 1, bias=False)
        ...     linear(x.chunk(2, dim=1)[backend.worker]).sum().backward()
        ...     half = linear.weight.grad.tolist()  # of the gradient
        ...     return half, layers.clip_grad_norm_(linear, max_norm=1.0).item()
        >>> linop.launch(main, workers=2)
        [([[3.0]], 5.0), ([[4.0]], 5.0)]
    """
    kind = float(norm_type)
    if not kind:
        raise ArgumentError(f"clip_grad_norm_: norm_type={norm_type}; another number expected")
    every = _named(parameters)
    named = {key: p for key, p in every.items() if p.grad is not None}
    norms = agreed_norms(groups_of(every.values(), program_backend()), named, kind)
    total = total_norm(norms, kind)
    if error_if_nonfinite and not isfinite(total):
        raise BackendError(
            f"clip_grad_norm_: the norm of order {norm_type} of all gradients is {total.item()}, "
            f"and they cannot be clipped by it; pass error_if_nonfinite=False to do so anyway"
        )
    dtypes = [norm.dtype for norm in norms] or [torch.float32]
    total = total.to(reduce(torch.promote_types, dtypes))
    torch.nn.utils.clip_grads_with_norm_(named.values(), max_norm, total, foreach)
    return total


def agreed_norms(groups: Groups, named: Mapping[Key, Tensor], kind: float) -> list[Norm]:
    """Norms of all workers' gradients, each element counted once. Collective.

    Args:
        groups: those of the parameters.
        named: this worker's parameters that have gradients.
        kind: order of the norm.

    Raises:
        BackendError: workers have different norms of a gradient that each holds whole; on every
            worker.
    """
    return _agreed(groups.gather_objects(_norms(groups, named, kind), "clip gradients"))


def total_norm(norms: Sequence[Norm], kind: float) -> Tensor:
    """The norm of all, in float64."""
    return _norm([torch.tensor(norm.value, dtype=torch.float64) for norm in norms], kind)


def _named(parameters: Any) -> dict[Key, Tensor]:
    if isinstance(parameters, torch.nn.Module):
        return dict(parameters.named_parameters())
    if isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    every = list(parameters)
    known = blocks()
    # Of those that a group cuts alone, as a shard of a plain module, others have copies.
    whole = [p for p in every if all(one.shards for one in known.get(id(p), ()))]
    cut = [p for p in every if not all(one.shards for one in known.get(id(p), ()))]
    # Counted for each of the axes that cut them, over which workers may have different ones.
    counts: Counter[str] = Counter()
    named: dict[Key, Tensor] = {}
    for p in cut:
        axes = [getattr(one.layer, "axis", None) for one in known[id(p)]]
        over = " × ".join(axis.name for axis in axes if axis is not None)
        named[f"block {counts[over]} of {over}".removesuffix(" of ")] = p
        counts[over] += 1
    return named | dict(enumerate(whole))


def _norms(groups: Groups, named: Mapping[Key, Tensor], kind: float) -> list[Norm]:
    """This worker's norms: one of its blocks together, and one of each gradient of which others
    have copies."""
    known, mine, norms = blocks(), [], []
    for key, p in named.items():
        cut = {block.layer.backend: block for block in known.get(id(p), ())}
        assert p.grad is not None
        values = _values(p.grad)
        if groups.cover(cut):
            if values.numel() and all(block.counts for block in cut.values()):
                mine.append(values)
        elif values.numel() or not cut:
            norm = _norm([values], kind)
            norms.append(Norm(key, norm.item(), norm.dtype, tuple(p.shape), groups.place(cut)))
    if mine:
        norm = _norm(mine, kind)
        norms.append(Norm(None, norm.item(), norm.dtype))
    return norms


def _values(gradient: Tensor) -> Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _norm(tensors: Sequence[Tensor], kind: float) -> Tensor:
    """Norm of the tensors' norms, on the CPU, in torch's order of operations; 0 without tensors."""
    each = [torch.linalg.vector_norm(tensor.detach(), kind).cpu() for tensor in tensors]
    return torch.linalg.vector_norm(torch.stack(each), kind) if each else torch.zeros(())


def _agreed(said: Sequence[Sequence[Norm]]) -> list[Norm]:
    """Norms to be combined: those of all blocks; of each gradient held whole, the first worker's.

    Raises:
        BackendError: workers have different norms of a gradient that each holds whole.
    """
    counted: list[Norm] = []
    first: dict[tuple[Key, tuple[int | None, ...]], tuple[int, Norm]] = {}
    for worker, norms in enumerate(said):
        for norm in norms:
            if norm.key is None:
                counted.append(norm)
                continue
            there, other = first.setdefault((norm.key, norm.at), (worker, norm))
            if there == worker:
                counted.append(norm)
            elif not _same(norm, other):
                raise BackendError(_DIFFERENT.format(norm, other, worker, there))
    return counted


def _same(one: Norm, other: Norm) -> bool:
    # Equal gradients may round differently between workers, as with other numbers of threads.
    close = isclose(one.value, other.value, rel_tol=torch.finfo(one.dtype).eps ** 0.5)
    either = close or not (isfinite(one.value) or isfinite(other.value))
    return either and one.shape == other.shape


_DIFFERENT = (
    "clip_grad_norm_: the gradient of parameter {0.key!r}, of shape {0.shape}, has norm "
    "{0.value:.6g} on worker {2}, and {1.value:.6g} on worker {3}, of shape {1.shape}. Workers "
    "that hold a parameter whole need its whole gradient: a plain module on a tensor that is cut "
    "has that of its block alone. Use a layer of linop.layers, or sum its gradients over workers; "
    "and pass the model, not its parameters, where workers have different plain modules"
)
