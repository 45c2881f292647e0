"""Guards on torch functions that would be wrong on blocks of parameters: given one, they raise an
error that names the alternative. On other tensors they are unchanged.

Optimizers are checked by torch's own hook, parametrizations when their layer is called. For the
others torch has no hook: they are wrapped, which does not reach names that a program has imported
before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from linop.errors import ArgumentError
from linop.layers.parameters.blocks import Block, block_of_gradients, blocks, first_block
from linop.layers.parameters.partial_states import refuse_optimizer_state
from linop.layers.parameters.scaling import GradScaler

_INITIALISERS = (
    "dirac_",
    "eye_",
    "kaiming_normal_",
    "kaiming_uniform_",
    "normal_",
    "orthogonal_",
    "sparse_",
    "trunc_normal_",
    "uniform_",
    "xavier_normal_",
    "xavier_uniform_",
)
_OPTIMIZERS = tuple(
    getattr(torch.optim, name)
    for name in ("Adafactor", "LBFGS", "Muon")
    if hasattr(torch.optim, name)
)
"""Optimizers whose steps are not elementwise; older versions of torch lack some of them."""
_PARAMETRIZATIONS = ("SpectralNorm", "WeightNorm", "_Orthogonal", "_SpectralNorm", "_WeightNorm")
"""torch's classes, of the old and the new API, that need norms or factors of a whole tensor."""
Function = Callable[..., Any]
_REPLACED: set[str] = set()
"""Shapes of parameters that were replaced; without any, no optimizer is searched for them."""


def install() -> None:
    """Wrap torch's functions, and register the hook; once in a process."""
    for name in _INITIALISERS:
        _wrap([torch.nn.init], name, _initialiser)
    _wrap([torch.nn.utils, torch.nn.utils.clip_grad], "clip_grad_norm_", _clipping)
    _wrap([torch.nn.utils, torch.nn.utils.clip_grad], "get_total_norm", _norm)
    for name in ("step", "unscale_"):
        _wrap([torch.amp.GradScaler], name, _scaling)
    register_optimizer_step_pre_hook(_check_optimizer)


def _wrap(owners: Sequence[Any], name: str, wrapped: Callable[[Function], Function]) -> None:
    function = getattr(owners[0], name)
    for owner in owners:
        setattr(owner, name, functools.wraps(function)(wrapped(function)))


def _initialiser(function: Function) -> Function:
    def guarded(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        block = first_block([tensor])
        if block is not None:
            name = function.__name__
            raise _refused(
                f"torch.nn.init.{name}",
                block,
                f"linop.layers.initialize(layer, {block.name!r}, torch.nn.init.{name}, …), on "
                f"every worker, sees the whole of a layer's; do it before fully_shard",
            )
        return function(tensor, *args, **kwargs)

    return guarded


def _clipping(function: Function) -> Function:
    def guarded(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(parameters, torch.Tensor | list):
            parameters = list(parameters)
        block = first_block([parameters] if isinstance(parameters, torch.Tensor) else parameters)
        if block is not None:
            instead = "linop.layers.clip_grad_norm_ takes the norm of all workers' gradients"
            raise _refused("torch.nn.utils.clip_grad_norm_", block, instead)
        return function(parameters, *args, **kwargs)

    return guarded


def _norm(function: Function) -> Function:
    def guarded(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        block, given = first_block(tensors), "a"
        if block is None:
            block, given = block_of_gradients(tensors), "the gradient of a"
        if block is not None:
            instead = "linop.layers.clip_grad_norm_ with max_norm=inf gives that of all gradients"
            raise _refused("torch.nn.utils.get_total_norm", block, instead, given)
        return function(tensors, *args, **kwargs)

    return guarded


def _scaling(function: Function) -> Function:
    def guarded(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if self.is_enabled() and not isinstance(self, GradScaler):
            block = first_block(_of_optimizer(optimizer))
            if block is not None:
                instead = "linop.layers.GradScaler skips steps on all workers, or on none"
                raise _refused("torch.amp.GradScaler", block, instead)
        return function(self, optimizer, *args, **kwargs)

    return guarded


def replace(parameters: Iterable[Any]) -> None:
    """Mark parameters in whose place a module has others now: optimizers of them would do
    nothing."""
    for p in parameters:
        p._linop_replaced = True
        _REPLACED.add(str(tuple(p.shape)))


def _check_optimizer(optimizer: Any, *args: Any) -> None:
    # At the first step: it looks at every parameter.
    if hasattr(optimizer, "_linop_checked"):
        return
    if _REPLACED:
        if any(hasattr(p, "_linop_replaced") for p in _of_optimizer(optimizer)):
            raise ArgumentError(
                f"torch.optim.{type(optimizer).__name__}: it has parameters of a module that was "
                f"sharded after it was made; make the optimizer after fully_shard"
            )
    parameters = list(_of_optimizer(optimizer))
    known = blocks(parameters)
    mine = (block for p in parameters for block in known.get(id(p), ()))
    block = next((block for block in mine if block.cut), None)
    if block is not None and isinstance(optimizer, _OPTIMIZERS):
        instead = "take one that works element by element, as SGD, Adam or AdamW"
        raise _refused(f"torch.optim.{type(optimizer).__name__}", block, instead)
    if block is not None and block.kind != "ShardedOptimizer":
        refuse_optimizer_state(optimizer)
    optimizer._linop_checked = True


def _of_optimizer(optimizer: Any) -> Iterable[Any]:
    return (p for group in optimizer.param_groups for p in group["params"])


def unfit_parametrization(layer: Any, cut: Collection[str]) -> str:
    """Description of a parametrization of a layer that would take norms of blocks; empty if there
    is none.

    Args:
        cut: names of the parameters that are split into several blocks.
    """
    old = [(getattr(hook, "name", ""), hook) for hook in layer._forward_pre_hooks.values()]
    new = layer._modules.get("parametrizations") or {}
    for name, one in [*old, *((name, one) for name, chain in new.items() for one in chain)]:
        kind = type(one).__name__
        if name in cut and kind in _PARAMETRIZATIONS:
            return (
                f"{kind.lstrip('_')} of {name!r}, of which workers have blocks, would be that of "
                f"each block; linop.layers has none of the whole"
            )
    return ""


def _refused(what: str, block: Block, instead: str, given: str = "a") -> ArgumentError:
    return ArgumentError(
        f"{what}: given {given} parameter {block.name!r} of a {block.kind}, of which this worker "
        f"has a block, not the whole of shape {block.space.global_shape}; {instead}"
    )
