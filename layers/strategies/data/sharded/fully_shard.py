"""Sharded parameters: each worker keeps a part of every parameter, and has all of it while a module
computes with it (`linop.strategies.data.sharded.unit`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from linop.errors import ArgumentError, expect
from linop.layers.layer import Layer
from linop.layers.parameters.blocks import Block, blocks
from linop.layers.parameters.partial_states import refuse_shards
from linop.layers.parameters.torch_guards import replace as mark_replaced
from linop.layers.state.state import gathered, scatter_state
from linop.layers.state.workers import Workers
from linop.spaces.region import integer
from linop.strategies.data.mean_losses import Hint, mean_checked, reduction_checked
from linop.strategies.data.replicas import agree, check_equal, check_written, described
from linop.strategies.data.sharded.members import Member, rows, shard_marked
from linop.strategies.data.sharded.precision import Inputs, dtype_checked
from linop.strategies.data.sharded.shards import Shard
from linop.strategies.data.sharded.unit import Unit
from linop.strategies.data.sharded.units import units_of
from linop.strategies.data.sharded.unsharded import unsharded
from linop.strategies.interrupted import end_if_interrupted
from linop.strategies.mesh import Axis

_NAME = "fully_shard"


def fully_shard(
    module: Any,
    axis: Axis,
    *,
    reshard_after_forward: bool = True,
    prefetch: int = 0,
    offload: bool = False,
    reduction: str | None = None,
    param_dtype: Any = None,
    reduce_dtype: Any = None,
) -> Any:
    """Shard the parameters of a module over the workers of a mesh's axis, in place. Collective.

    Each worker keeps a block of the rows of every parameter, balanced, and any optimizer of torch
    that treats elements alone (such as SGD and Adam) has a state for these alone. The parameters of
    one call are gathered together, before the module's forward; so call it for the layers of a
    model first, and then for the model, which takes what is left, if anything is. Gradients of
    shards, in ``grad`` after backward, are sums over the workers; nothing is divided unless asked
    for; a parameter that no worker used has the gradient None. All workers call the same modules in
    the same order, and run the same backward.

    Outside of forwards a module has its shards, which refuse to be computed with, and so does its
    ``state_dict``: `unsharded` gives whole parameters, `full_state_dict` the state. Micro-batches
    under ``with module.no_sync():`` (that is `unsharded`) are summed over the workers once, at its
    end.

    Args:
        module: the same on all workers. Parameters on the meta device become shards of NaN, to
            which `load_full_state_dict` gives values.
        axis: such as ``mesh["dp"]``.
        reshard_after_forward: True (ZeRO stage 3): whole parameters are given up after forward, and
            gathered again in backward. False (stage 2): they are kept until backward has used them.
        prefetch: the number of calls' parameters that are gathered while these are computed with:
            in forward of those that followed in the last forward, in backward of those before. A
            worker holds as many more whole ones. A call that was gathered ahead has its gradients
            summed while backward computes the calls before it, as many.
        offload: shards, and so their gradients and the optimizer's state, are in host memory.
        reduction: as of `linop.strategies.DataParallel`: "mean" divides gradients by the number of
            workers, and is refused where there are experts; "sum", the default, does not, and by
            default a mean loss is warned of, once.
        param_dtype: of whole parameters, such as torch.bfloat16; of the inputs of the module's
            forward, too, which are converted. By default that of the shards, which keep theirs, as
            the optimizer's state does.
        reduce_dtype: of the sums of gradients over the workers, which is the dtype of G.H; by
            default that of the shards, and float32 if that is one of half precision.

    Returns:
        The module.

    Raises:
        ArgumentError: it is no module, has been sharded already, or a parameter is shared
            with a module that is sharded, or a block of a `linop.layers.Layer`; `prefetch` is no
            number from 0. BackendError: modules or values differ between workers.
            On every worker.

    Example:
        Each worker keeps one row of two of the weight, and gets its gradient, of all rows of x:

        >>> import copy
        >>> net, x = torch.nn.Linear(2, 2), torch.arange(8.0).view(4, 2)
        >>> def program(backend):
        ...     mine = strategies.fully_shard(copy.deepcopy(net), strategies.Mesh(dp=2)["dp"])
        ...     mine(x.chunk(2)[backend.worker]).sum().backward()
        ...     return tuple(mine.weight.shape), mine.weight.grad.tolist()
        >>> linop.launch(program, workers=2)
        [((1, 2), [[12.0, 16.0]]), ((1, 2), [[12.0, 16.0]])]
    """
    places: dict[Any, list[tuple[Any, str]]] = {}
    names: dict[Any, str] = {}
    if not isinstance(axis, Axis):
        raise ArgumentError(f"axis: one of a linop.strategies.Mesh expected, given {axis!r}")

    def checked() -> tuple[tuple[dict[str, Tensor], int], Any]:
        if not isinstance(module, torch.nn.Module):
            raise ArgumentError(f"a torch.nn.Module expected, given {module!r}")
        for what, flag in ("reshard_after_forward", reshard_after_forward), ("offload", offload):
            expect(what, flag, bool)
        ahead = integer(prefetch, "fully_shard: prefetch")
        if ahead < 0:
            raise ArgumentError(f"prefetch={ahead}; a number from 0 expected")
        check_written(module, axis.size)
        _collect(module, axis, places, names)
        found = {names[p]: p for p in places}
        reduction_checked(reduction)
        mean_checked(reduction, _experts(module) if axis.size > 1 else ())
        dtype_checked("param_dtype", param_dtype)
        dtype_checked("reduce_dtype", reduce_dtype)
        options = reshard_after_forward, ahead, offload, reduction
        said = described(found), options, str(param_dtype), str(reduce_dtype)
        return (found, ahead), said

    found, ahead = agree(axis.backend, _NAME, checked)
    check_equal(found, axis.backend, _NAME)
    memory = "host" if offload else "default"
    dtypes = param_dtype, reduce_dtype
    if param_dtype is not None:
        module.register_forward_pre_hook(Inputs(param_dtype), with_kwargs=True)
    for unit, parameters in units_of(type(module).__name__, found, places, axis, memory, dtypes):
        unit.reshards, unit.prefetch = reshard_after_forward, ahead
        unit.terms = axis.size if reduction == "mean" else 1
        if reduction is None and axis.size > 1 and axis.index == 0:
            cure = "loss * len(rows) / (rows of all workers) for any"
            # One hint for all calls over the axis.
            hint = axis.backend.kept.get(Hint)
            hint = hint or Hint(_NAME, axis.size, cure, bool(_experts(module)))
            unit.hint = axis.backend.kept.setdefault(Hint, hint)
        pairs = zip(unit.members, parameters, strict=True)
        unit.have_shards([_shard(member, p, axis, offload) for member, p in pairs])
        unit.put(unit.shards)
        module.register_forward_pre_hook(unit.enter)
        # The last one that entered leaves first.
        module.register_forward_hook(unit.leave, always_call=True, prepend=True)
        end_if_interrupted(module, unit.opened, unit.interrupt)
        for owner in {owner: None for member in unit.members for owner, _ in member.places}:
            if axis.size > 1:
                refuse_shards(owner)
            if owner is not module:
                owner.register_forward_pre_hook(unit.used)
        module._linop_units = [*getattr(module, "_linop_units", ()), unit]
    module.no_sync = partial(unsharded, module)
    for p in found.values():
        p._linop_strategy = "sharded"  # type: ignore[attr-defined]  # an attribute of ours
    mark_replaced(found.values())
    return module


def _collect(
    module: Any, axis: Axis, places: dict[Any, list[tuple[Any, str]]], names: dict[Any, str]
) -> None:
    """Parameters that are not sharded yet, with all places that have them."""
    every = (p for owner in module.modules() for p in owner._parameters.values())
    known = blocks(p for p in every if p is not None)
    for prefix, owner in module.named_modules():
        for attribute, p in owner._parameters.items():
            already = "" if p is None else getattr(p, "_linop_strategy", "")
            if p is None or already == "shard":
                continue
            name = f"{prefix}.{attribute}".removeprefix(".")
            if not all(_across(block, axis) for block in known.get(id(p), ())):
                raise ArgumentError(
                    f"parameter {name!r} is a block that a linop.layers.Layer has cut; modules of "
                    f"torch expected, or tensor-parallel ones over another axis of the mesh"
                )
            if already:
                both = " and shared with this one: shard both in one call"
                shared = both if already == "sharded" else ""
                raise ArgumentError(
                    f"parameter {name!r} is in a module that is already {already}{shared}"
                )
            places.setdefault(p, []).append((owner, attribute))
            names.setdefault(p, name)
    if not places and hasattr(module, "_linop_units"):
        raise ArgumentError("the module is sharded already")


def _experts(module: Any) -> list[str]:
    """Names of modules whose gradients are sums over the rows of all workers of another axis."""
    return [
        name or type(one).__name__
        for name, one in module.named_modules()
        if getattr(one, "sums_over_axis", False) and one.axis.size > 1
    ]


def _across(block: Block, axis: Axis) -> bool:
    """True for a block of a tensor-parallel module over another axis of the mesh: all workers of
    this one have the same block."""
    if axis.size == 1:
        return True
    other = getattr(block.layer, "axis", None)
    return isinstance(other, Axis) and len({*other.workers} & {*axis.workers}) == 1


def _shard(member: Member, p: Tensor, axis: Axis, offload: bool) -> Any:
    """This worker's rows of a parameter, in memory of their own."""
    if p.device.type == "meta":
        shape = member.space.local_shape(axis.index)
        block = torch.full(shape, float("nan"), dtype=p.dtype, device="cpu" if offload else None)
    else:
        block = rows(member, p, axis).to("cpu" if offload else p.device, copy=True)
    kind = Shard if axis.size > 1 else torch.nn.Parameter
    shard: Any = kind(block, requires_grad=p.requires_grad)
    shard_marked(shard, member.name, axis.backend)
    return shard


def _units(module: Any) -> list[tuple[str, Unit]]:
    """Units of a module, with the path of their modules."""
    return [
        (prefix + "." if prefix else "", unit)
        for prefix, owner in module.named_modules()
        for unit in getattr(owner, "_linop_units", ())
    ]


def full_state_dict(module: Any) -> dict[str, Tensor]:
    """The state of the sequential model, on every worker: whole parameters of sharded and
    tensor-parallel modules, and this worker's buffers. Collective.

    Raises:
        ArgumentError: the module has no parameters in blocks.

    Example:
        >>> import copy
        >>> net = torch.nn.Linear(2, 2)
        >>> def program(backend):
        ...     mine = strategies.fully_shard(copy.deepcopy(net), strategies.Mesh(dp=2)["dp"])
        ...     state = strategies.full_state_dict(mine)
        ...     return sorted(state), torch.equal(state["weight"], net.weight)
        >>> linop.launch(program, workers=2)
        [(['bias', 'weight'], True), (['bias', 'weight'], True)]
    """
    whole: dict[int, tuple[Unit, Tensor]] = {}
    units = _checked(module)
    workers = Workers("full_state_dict", module)
    with torch.no_grad():
        for _, unit in units:
            for shard, tensor in zip(unit.shards, unit.values(), strict=True):
                whole[id(shard)] = unit, tensor
    state = {}
    for key, item in workers.tensors.items():
        if id(item.block) in whole:
            unit, tensor = whole[id(item.block)]
            # A tensor-parallel module's is a block again.
            outer = {key: space for key, space in item.spaces.items() if key is not unit.backend}
            item = replace(item, spaces=outer, block=tensor)
        value = gathered(workers, item, None)
        assert value is not None
        state[key] = value
    return state


def load_full_state_dict(module: Any, state: Mapping[str, Tensor] | None) -> None:
    """Give shards and buffers the values of a sequential model's state, as
    `linop.layers.scatter_state` does: each worker copies its own rows, so that a state in a file
    (``torch.load(file, mmap=True)``) is read in part. Buffers on the meta device get memory.
    Collective.

    Args:
        module: with sharded parameters, or those of tensor-parallel modules.
        state: on all workers; or on some, with None on others.

    Raises:
        ArgumentError, ShapeError: names or shapes differ. BackendError: no worker has a state. All
            on every worker, before anything is changed.

    Example:
        The whole weight is on no worker: the module is on the meta device, and each copies its row.

        >>> saved = {"weight": torch.arange(4.0).view(2, 2)}
        >>> def program(backend):
        ...     net = torch.nn.Linear(2, 2, bias=False, device="meta")
        ...     mine = strategies.fully_shard(net, strategies.Mesh(dp=2)["dp"])
        ...     strategies.load_full_state_dict(mine, saved)
        ...     return mine.weight.tolist()
        >>> linop.launch(program, workers=2)
        [[[0.0, 1.0]], [[2.0, 3.0]]]
    """
    _checked(module)
    scatter_state(module, state)


def _checked(module: Any) -> list[tuple[str, Unit]]:
    units = _units(expect("a module with sharded parameters", module, torch.nn.Module))
    if not units and not any(isinstance(one, Layer) for one in module.modules()):
        raise ArgumentError("the module has no sharded parameters: call fully_shard first")
    return units
