"""Floors of strategies, by hand in mpi4py: steps beside which its times show linop's
own share.

ZeRO 1 moves half as much again as the sum of gradients that it is compared with: the updated
parameters are gathered. ZeRO 2 and 3 for modules that stay as they are enter each of them by hooks
and by a function of torch's graph, in Python, whatever moves the data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Step = Callable[[], None]


def sharded_update(
    comm: Any, net: Any, x: Any, optimizer: Callable[[list[Any]], Any], scatters: bool
) -> Step:
    """A step of stage 1 for parameters that are views of one flat tensor: this rank's part is
    updated, and the parts are gathered.

    Args:
        optimizer: makes one of this rank's part.
        scatters: True: a part of the sum of gradients reaches each rank; False: all of it, so that
            gradients are those of all ranks, as after `linop.strategies.DataParallel`.
    """
    from mpi4py import MPI

    parameters = [*net.parameters()]
    sizes = [p.numel() for p in parameters]
    size = -(-sum(sizes) // comm.size) * comm.size
    flat, total = torch.zeros(size), torch.zeros(size)
    parts, views = (one[: sum(sizes)].split(sizes) for one in (flat, total))
    for p, part in zip(parameters, parts, strict=True):
        part.copy_(p.detach().reshape(-1))
        p.data = part.view(p.shape)
    own = torch.nn.Parameter(flat.chunk(comm.size)[comm.rank])
    own.grad = torch.zeros_like(own) if scatters else total.chunk(comm.size)[comm.rank]
    update = optimizer([own])

    def step() -> None:
        net.zero_grad()
        net(x).square().sum().backward()
        torch.cat([p.grad.reshape(-1) for p in parameters], out=total[: sum(sizes)])
        if scatters:
            comm.Reduce_scatter_block(total.numpy(), own.grad.numpy())
        else:
            comm.Allreduce(MPI.IN_PLACE, total.numpy())
            for p, view in zip(parameters, views, strict=True):
                p.grad = view.view(p.shape)
        update.step()
        comm.Allgather(MPI.IN_PLACE, flat.numpy())

    return step


def hooked(comm: Any, net: Any, again: bool) -> Any:
    """A net whose linear layers have flat shards as parameters; hooks gather each layer's before
    its forward, into memory that is there already, and put the shards back.

    Args:
        again: True (stage 3): all layers have the same memory, and gather again in backward.
    """
    layers = [layer for layer in net.modules() if isinstance(layer, torch.nn.Linear)]
    buffers = {id(layer): torch.empty(_size(layer)) for layer in layers}
    for layer in layers:
        into = buffers[id(layers[0] if again else layer)]
        _hook(comm, layer, into[: _size(layer)], again)
    return net


def _size(layer: Any) -> int:
    return sum(p.numel() for p in layer.parameters())


def _hook(comm: Any, layer: Any, whole: Any, again: bool) -> None:
    shape = layer.weight.shape
    count, given = shape.numel(), torch.empty_like(whole)
    flat = torch.cat([layer.weight.detach().reshape(-1), layer.bias.detach()])
    shard = torch.nn.Parameter(flat.chunk(comm.size)[comm.rank].clone())
    mine, theirs = shard.detach().numpy(), whole.numpy()
    del layer.weight, layer.bias
    layer.register_parameter("shard", shard)

    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, shard: Any) -> Any:
            comm.Allgather(mine, theirs)
            return whole[:count].view(shape), whole[count:].view(-1)

        @staticmethod
        def backward(ctx: Any, weight: Any, bias: Any) -> Any:
            torch.cat([weight.reshape(-1), bias], out=given)
            own = torch.empty_like(shard)
            comm.Reduce_scatter_block(given.numpy(), own.numpy())
            return own

    def enter(module: Any, arguments: Any) -> None:
        module._parameters["weight"], module._parameters["bias"] = Gather.apply(shard)
        module._parameters["shard"] = None

    def leave(module: Any, arguments: Any, result: Any) -> None:
        if again and arguments[0].requires_grad:
            result.register_hook(lambda gradient: comm.Allgather(mine, theirs))
        module._parameters["weight"] = module._parameters["bias"] = None
        module._parameters["shard"] = shard

    layer.register_forward_pre_hook(enter)
    layer.register_forward_hook(leave)
