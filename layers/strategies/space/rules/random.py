"""Dropouts: every element's number is a function of a seed, which worker 0 draws once a call of the
module, and of its index in the whole tensor. So each worker makes its block of the mask that one
worker makes alone; the masks are those of the module on any grid, and not torch's own."""

from __future__ import annotations

from typing import Any

from linop.strategies.space.call import Call, Gathered, Refused
from linop.strategies.space.draws import kept, next_key


def dropout(call: Call, input: Any, p: float = 0.5, train: bool = True) -> Any:
    """dropout, feature_dropout, and those in place."""
    x = call.cut(input)
    if not train or not p:
        return x
    if not 0 <= p <= 1:
        raise Gathered
    key = next_key()
    if key is None:
        raise Refused(
            "draws random numbers outside of a call of the spatial module, where its workers would "
            "draw different ones"
        )
    where = [slice(*call.grid.range_of(x.blocks, d)) for d in range(x.ndim)]
    factor = kept(call.name, key, x.block, x.blocks.shape, where, p)
    if call.name.endswith("_"):
        x.block.mul_(factor)
        return x
    return call.wrap(x.block * factor, x.blocks)


def rand_like(call: Call, input: Any, **kwargs: Any) -> Any:
    """rand_like, randn_like, bernoulli of a cut tensor."""
    raise Refused(
        "draws a random number for each element of a tensor that is cut; draw them for a whole "
        "tensor, torch.rand(x.shape), which is the same on all workers"
    )
