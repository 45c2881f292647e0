"""Offloading: of a chain of modules, what autograd keeps is moved to another memory, and back; or
the parameters are there, and brought in when a module computes with them."""

from __future__ import annotations

from typing import Any

import torch

from linop.backends.threads.backend import alone
from linop.errors import ArgumentError
from linop.layers.agreement.input_agreement import program_backend
from linop.spaces.region import integer
from linop.strategies.data.sharded.fully_shard import fully_shard
from linop.strategies.data.sharded.prefetch import passes_of
from linop.strategies.data.sharded.unit import Unit
from linop.strategies.memory.chain import chain
from linop.strategies.memory.members import members
from linop.strategies.memory.window import Window
from linop.strategies.mesh import Axis


def offload(
    net: Any, *, prefetch: int = 1, activations: bool = True, parameters: bool = False
) -> Any:
    """The chain of the same modules, of which autograd keeps tensors in host memory (vDNN: Rhu et
    al. 2016), but for those of `prefetch` + 1 consecutive modules.

    O = `linop.offload` moves out what the module k saved when module k + `prefetch` has computed;
    O.H, the prefetch, brings it back when the backward of module k + `prefetch` begins. Buffers
    stay. Gradients are those of the plain chain, bit for bit. Without a device, both
    memories are host memory, and tensors are copied from one to the other all the same.

    With `parameters` those of the chain are in host memory, and modules compute with O.H of them:
    copies that are brought in when the forward of the module `prefetch` before begins, and given up
    after their module's; in backward again. Gradients, on their way while backward computes, are
    O of those on the copies, and in host memory too, as the optimizer's state is. It is
    `fully_shard` of each module, over this worker alone. Make the optimizer afterwards.

    Of a chain that `checkpoint` made, modules are its groups, and what is moved are their inputs;
    `checkpoint` of a chain that is offloaded is the same. Workers may differ in `prefetch`.

    Of a `torch.nn.ModuleList`, whose modules their owner calls, as ``model.layers`` of
    transformers, modules are its members in the order of their calls, whatever their arguments and
    results are: see `checkpoint`.

    Args:
        net: the chain, a `torch.nn.Sequential`; its modules, and the names in its state, are
            shared. Or a `torch.nn.ModuleList`.
        prefetch: the number of modules ahead (of parameters, of those that have some); 0: what
            comes back is waited for.
        activations: move what autograd keeps.
        parameters: have the parameters in host memory.

    Returns:
        The chain, or the list with the same members. Of activations its `window` counts bytes:
        ``window.bytes_here``, ``window.bytes_away``; of parameters it does: ``bytes_here``,
        ``bytes_leaving``.

    Raises:
        ArgumentError: it is neither, `prefetch` is below 0, nothing is to be moved, or
            parameters are sharded or data parallel, or modules share one. BackendError: from
            backward, a saved tensor was changed in place.

    Example:
        While autograd's tensors are away, the gradients stay those of the plain chain, bit for bit:

        >>> import copy
        >>> net = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
        >>> moved = strategies.offload(copy.deepcopy(net), prefetch=1)
        >>> loss, wanted = (model(torch.ones(2, 4)).square().sum() for model in (moved, net))
        >>> moved.window.bytes_away > 0
        True
        >>> loss.backward(), wanted.backward()
        (None, None)
        >>> all(torch.equal(p.grad, q.grad) for p, q in zip(net.parameters(), moved.parameters()))
        True
    """
    listed = isinstance(net, torch.nn.ModuleList)
    made: Any = members(net, "offload") if listed else chain(net, "offload")
    if integer(prefetch, "offload: prefetch") < 0:
        raise ArgumentError(f"offload: prefetch={prefetch}; at least 0 expected")
    if not activations and not parameters:
        raise ArgumentError("offload: activations=True or parameters=True expected")
    if parameters:
        made.units = _away(made, prefetch)
    if activations and listed:
        made.save_in(Window(prefetch))
    elif activations:
        made.window = Window(prefetch)
    return made


def _away(net: Any, prefetch: int) -> list[Unit]:
    """Units of the parameters of a chain's modules, which are in host memory then."""
    _check(net)
    axis = Axis("alone", (0,), 0, alone(program_backend().arrays))
    units: list[Unit] = []
    for module in net:
        if [*module.parameters()]:
            fully_shard(module, axis, prefetch=prefetch, offload=True)
            units += module._linop_units
    passes_of(axis.backend).expect(units)
    return units


def _check(net: Any) -> None:
    """Check that each module of a chain may have its parameters moved, before any is."""
    seen: dict[Any, str] = {}
    for name, p in net.named_parameters(remove_duplicate=False):
        if getattr(p, "_linop_strategy", ""):
            raise ArgumentError(
                f"offload: parameter {name!r} is {p._linop_strategy} already; sharded ones are in "
                f"host memory by fully_shard(..., offload=True), and DataParallel comes afterwards"
            )
        module = name.split(".")[0]
        if seen.setdefault(p, module) != module:
            raise ArgumentError(
                f"offload: parameter {name!r} is one of module {seen[p]!r}, too; parameters that "
                f"modules of a chain share cannot be moved: make one module of those"
            )
    if not seen:
        raise ArgumentError("offload: the chain has no parameters to be moved")
