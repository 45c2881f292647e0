"""Properties of tensors and questions about them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

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
    """Backward from a cut tensor, with a gradient that is cut, or whole; and
    `torch.autograd.backward`, from some tensors."""
    if not isinstance(x, Tensor):
        grads = kwargs.pop("grad_tensors", gradient)
        inputs = kwargs.pop("inputs", None)
        kwargs["inputs"] = None if inputs is None else [_block(one) for one in inputs]
        torch.autograd.backward(*_seeds(call, x, grads), *args, **kwargs)
        return None
    if "inputs" in kwargs and kwargs["inputs"] is not None:
        given = kwargs["inputs"]
        given = [given] if isinstance(given, Tensor) else given
        kwargs["inputs"] = [_block(one) for one in given]
    blocks, grads = _seeds(call, [x], None if gradient is None else [gradient])
    return blocks[0].backward(grads[0], *args, **kwargs)


def gradients(
    call: Call,
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: Any = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: Any = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> Any:
    """torch.autograd.grad: gradients have the layouts of the inputs."""
    if is_grads_batched:
        raise Refused("of a tensor that is cut, of a batch of gradients; call it for each of them")
    blocks, grads = _seeds(call, outputs, grad_outputs)
    found = torch.autograd.grad(
        blocks,
        [_block(x) for x in inputs],
        grads,
        retain_graph=retain_graph,
        create_graph=create_graph,
        allow_unused=allow_unused,
        materialize_grads=materialize_grads,
    )
    return tuple(
        call.wrap(g, x.blocks) if isinstance(x, CutTensor) and g is not None else g
        for g, x in zip(found, inputs, strict=True)
    )


def _block(x: Any) -> Any:
    return x.block if isinstance(x, CutTensor) else x


def _seeds(call: Call, outputs: Any, grads: Any) -> tuple[list[Any], list[Any]]:
    """Blocks of outputs, and of the gradients that backward begins with.

    Raises:
        Refused: a cut output has no gradient.
    """
    if isinstance(grads, Tensor):
        grads = [grads]
    grads = [None] * len(outputs) if grads is None else list(grads)
    if len(grads) != len(outputs):
        raise Refused(f"of {len(outputs)} tensors, some cut, has {len(grads)} gradients")
    mine = []
    for y, g in zip(outputs, grads, strict=True):
        if isinstance(y, CutTensor):
            if g is None:
                raise Refused(
                    "of a tensor that is cut needs a gradient; sum it first: y.sum().backward()"
                )
            if g.shape != y.shape:
                raise Refused(
                    f"of a tensor that is cut, of shape {tuple(y.shape)}, has a gradient of shape "
                    f"{tuple(g.shape)}"
                )
            g = call.beside(g, y.blocks, {d: d for d in range(y.ndim)})
        elif isinstance(g, CutTensor):
            g = g.whole()
        mine.append(g)
    return [_block(y) for y in outputs], mine


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
