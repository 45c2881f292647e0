"""Offloading: of a chain of modules, what autograd keeps is moved to another memory, and back."""

from __future__ import annotations

from typing import Any

from linop.errors import ArgumentError
from linop.spaces.region import integer
from linop.strategies.memory.chain import chain
from linop.strategies.memory.window import Window


def offload(net: Any, *, prefetch: int = 1) -> Any:
    """The chain of the same modules, of which autograd keeps tensors in host memory (vDNN: Rhu et
    al. 2016), but for those of `prefetch` + 1 consecutive modules.

    O = `linop.offload` moves out what the module k saved when module k + `prefetch` has computed;
    O.H, the prefetch, brings it back when the backward of module k + `prefetch` begins. Parameters
    and buffers stay. Gradients are those of the plain chain, bit for bit. Without a device, both
    memories are host memory, and tensors are copied from one to the other all the same.

    Of a chain that `checkpoint` made, modules are its groups, and what is moved are their inputs;
    `checkpoint` of a chain that is offloaded is the same. Workers may differ in `prefetch`.

    Args:
        net: the chain, a `torch.nn.Sequential`; its modules, and the names in its state, are
            shared.
        prefetch: the number of modules ahead; 0: what comes back is waited for.

    Returns:
        The chain. Its `window` counts bytes: ``window.bytes_here``, ``window.bytes_away``.

    Raises:
        ArgumentError: it is no Sequential, or `prefetch` is below 0. BackendError: from backward, a
            saved tensor was changed in place.
    """
    made = chain(net, "offload")
    if integer(prefetch, "offload: prefetch") < 0:
        raise ArgumentError(f"offload: prefetch={prefetch}; at least 0 expected")
    made.window = Window(prefetch)
    return made
