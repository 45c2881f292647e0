"""Losses: element by element, then the sum or mean of the whole tensor."""

from __future__ import annotations

from typing import Any

import torch

from linop.strategies.space.call import Call, Gathered
from linop.strategies.space.cut_tensor import CutTensor
from linop.strategies.space.rules.elementwise import elementwise

_POSITIONS = {
    "binary_cross_entropy": 3,
    "binary_cross_entropy_with_logits": 4,
    "soft_margin_loss": 2,
    "poisson_nll_loss": 5,
}
"""Position of the reduction; 2 in others."""


def loss(call: Call, *args: Any, **kwargs: Any) -> Any:
    """mse_loss and others, which average over all elements."""
    at = _POSITIONS.get(call.name, 2)
    given = list(args)
    reduction: Any = kwargs.pop("reduction", 1)
    if len(given) > at:
        reduction = given[at]
        given[at] = 0
    else:
        kwargs["reduction"] = 0
    values = elementwise(call, *given, **kwargs)
    return values if reduction == 0 else values.sum() if reduction == 2 else values.mean()


def cross_entropy(
    call: Call,
    input: Any,
    target: Any,
    weight: Any = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:
    """cross_entropy_loss and nll_loss: of classes in dimension 1."""
    x = call.uncut(call.cut(input), (1,))
    if not isinstance(x, CutTensor) or x.ndim < 2 or target.ndim != x.ndim - 1:
        raise Gathered  # whole, or targets that are probabilities
    places = {0: 0, **{d: d - 1 for d in range(2, x.ndim)}}
    mine = call.beside(target, x.blocks, places)
    w = call.beside(weight, x.blocks)
    if call.name == "cross_entropy_loss":
        each_of: Any = torch._C._nn.cross_entropy_loss
        values = each_of(x.block, mine, w, 0, ignore_index, label_smoothing)
    else:
        values = torch.nn.functional.nll_loss(
            x.block, mine, w, ignore_index=ignore_index, reduction="none"
        )
    layout = x.blocks.moved_dims(places, target.shape)
    each = call.wrap(values, layout)
    if reduction == 0:
        return each
    if reduction == 2:
        return each.sum()
    counted = mine != ignore_index
    if w is None:
        weights = counted.to(values.dtype)
    else:
        weights = torch.where(counted, w.detach()[torch.where(counted, mine, 0)], 0)
    return each.sum() / call.wrap(weights, layout).sum()
