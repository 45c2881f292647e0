"""Parameters of a unit that no worker has used: they have no gradient, as in one process, and not
one of zeros, which an optimizer with weight decay or momentum would move them by.

Beside a unit's parameters travels a row of numbers of each worker, one for each parameter, and then
a note to the other workers. Forward gathers the notes; in backward a worker gives ones for the
parameters that it has a gradient for, and the sum over the workers comes back with those of the
gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from linop.layers.parameters.blocks import plain
from linop.spaces.partition import Partition
from linop.spaces.tensor import TensorSpace

_NAME = "uses of parameters"
"""No parameter has such a name."""


def use_space(members: Sequence[TensorSpace], more: int) -> TensorSpace:
    """Space of the numbers, a row on each worker.

    Args:
        members: spaces of the parameters.
        more: length of a note.
    """
    group: Partition = members[0].partition
    return TensorSpace((group.size, len(members) + more), group, members[0].dtype, [0], _NAME)


def noted(shards: Sequence[Tensor], note: Sequence[float], terms: int) -> tuple[Tensor, ...]:
    """Shards, and a row of numbers, to be gathered; in backward a shard gets no gradient if the
    row's gradient is zero for it.

    Args:
        note: the end of the row.
        terms: number that the sums of gradients are divided by, in the dtype of the shards: parts
            of half precision would be rounded before they are summed.
    """
    row = plain(shards[0]).new_tensor([[0.0] * len(shards) + [*note]])
    if not _in_graph():
        return *map(plain, shards), row
    with torch._C.DisableTorchFunctionSubclass():
        found: tuple[Tensor, ...] = _Shards.apply(row, terms, *shards)
    return found


def told(gathered: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Whole parameters, of those and the rows that were gathered; in backward the gradient of the
    rows says which parameters have one here."""
    if not _in_graph():
        return tuple(gathered[:-1])
    found: tuple[Tensor, ...] = _Wholes.apply(*gathered)
    return found


def _in_graph() -> bool:
    """False inside torch.func's transforms, which take no such functions: gradients are zeros."""
    return torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active()


class _Shards(torch.autograd.Function):
    """``_Shards.apply(row, terms, *shards)``: the shards, and the row."""

    @staticmethod
    def forward(ctx: Any, row: Tensor, terms: int, *shards: Tensor) -> Any:
        ctx.terms = terms
        return *(shard.view_as(shard) for shard in shards), row

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        *given, counts = gradients
        pairs = zip(given, counts[0].tolist(), strict=False)  # no gradient of a note
        sums = (gradient if count else None for gradient, count in pairs)
        if ctx.terms == 1:
            return None, None, *sums
        return None, None, *(None if one is None else one / ctx.terms for one in sums)

    @staticmethod
    def jvp(ctx: Any, row: Tensor, terms: None, *tangents: Tensor) -> Any:
        return *tangents, row


class _Wholes(torch.autograd.Function):
    """``_Wholes.apply(*copies, rows)``: the copies."""

    @staticmethod
    def forward(ctx: Any, *gathered: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.rows = gathered[-1].detach()
        return tuple(one.view_as(one) for one in gathered[:-1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        row = [float(gradient is not None) for gradient in gradients]
        row += [0.0] * (ctx.rows.shape[1] - len(row))
        return *gradients, ctx.rows.new_tensor(row).expand(ctx.rows.shape)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Any:
        return tangents[:-1]
