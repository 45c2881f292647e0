"""Properties of tensors and questions about them."""

from __future__ import annotations

from typing import Any

import torch

from linop.strategies.space.call import Call, Refused
from linop.strategies.space.cut_tensor import CutTensor


def of_whole(call: Call, *args: Any, **kwargs: Any) -> Any:
    """Facts of the whole tensor that torch knows: its shape, dtype and device."""
    with torch._C.DisableTorchFunctionSubclass():
        return call.function(*args, **kwargs)


def of_block(call: Call, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Facts that this worker's block tells."""
    return call.function(call.cut(x).block, *args, **kwargs)


def length(call: Call, x: Any) -> int:
    return int(x.shape[0])


def made(call: Call, *args: Any, **kwargs: Any) -> Any:
    """A constant of a shape that is given: whole."""
    given = [x.block if isinstance(x, CutTensor) else x for x in args]
    return call.function(*given, **kwargs)


def filled(call: Call, x: Any, *args: Any, **kwargs: Any) -> Any:
    """A constant like a tensor."""
    return call.wrap(call.function(call.cut(x).block, *args, **kwargs), x.blocks)


def backward(call: Call, x: Any, gradient: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Backward from a cut tensor, with a gradient that is cut, or whole."""
    if gradient is None:
        raise Refused("of a tensor that is cut needs a gradient; sum it first: y.sum().backward()")
    return call.cut(x).block.backward(
        call.beside(gradient, x.blocks, {d: d for d in range(x.ndim)}), *args, **kwargs
    )


def gradient(call: Call, x: Any) -> Any:
    """The gradient of a leaf."""
    found = call.cut(x).block.grad
    return None if found is None else call.wrap(found, x.blocks)


def keep(call: Call, x: Any, *args: Any, **kwargs: Any) -> Any:
    """requires_grad_, retain_grad: of this worker's block."""
    call.function(call.cut(x).block, *args, **kwargs)
    return x if call.name == "requires_grad_" else None


def numbers(call: Call, x: Any, *args: Any) -> Any:
    """A Python number, of a tensor of one element."""
    return call.function(call.cut(x).whole(), *args)


def set_data(call: Call, *_: Any) -> Any:
    raise Refused("of a tensor that is cut cannot be set")
