"""Refusals of torch's own ``state_dict`` and ``load_state_dict`` where a worker has blocks of
parameters: a file of these would look like a model's, and is none. The errors name what gathers the
state of the single-process model."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from linop.errors import ArgumentError
from linop.layers.parameters.blocks import Block, blocks
from linop.spaces.tensor import TensorSpace

_GATHERS = (
    "linop.strategies.full_state_dict(model), or linop.layers.gather_state, on every worker, gives "
    "that of the single-process model, and linop.layers.save(model, path) writes it"
)
_SCATTERS = (
    "linop.strategies.load_full_state_dict(model, state), or linop.layers.scatter_state, on every "
    "worker, gives each its blocks of the single-process model's, and linop.layers.load(model, "
    "path) those of a file"
)
_OPTIMIZERS = (
    "linop.layers.gather_optimizer_state(model, optimizer), on every worker, gives that of the "
    "single-process optimizer, and linop.layers.save(model, path, optimizer) writes it"
)


def is_partial(space: TensorSpace, worker: int) -> bool:
    """True if a worker has a block of a parameter, or nothing, and not the whole."""
    return len(space.regions) > 1 or worker not in space.partition


def refuse_saving(kind: str, key: str, space: TensorSpace) -> NoReturn:
    """Refuse ``state_dict``.

    Args:
        kind: name of the class of the module.
        key: of a parameter that is in blocks.
    """
    raise ArgumentError(f"state_dict: {_in_words(kind, key, space)}; {_GATHERS}")


def refuse_loading(kind: str, key: str, space: TensorSpace) -> NoReturn:
    """Refuse ``load_state_dict``; arguments as in `refuse_saving`."""
    raise ArgumentError(f"load_state_dict: {_in_words(kind, key, space)}; {_SCATTERS}")


def refuse_shards(module: Any) -> None:
    """Let a module whose parameters are shards refuse both: as a part of another one, too."""
    module.register_state_dict_pre_hook(_saving)
    module.register_load_state_dict_pre_hook(_loading)


def refuses_shards(hook: Any) -> bool:
    """True for the hooks of `refuse_shards`."""
    return hook in (_saving, _loading)


def _saving(module: Any, prefix: str, *unused: Any) -> None:
    for name, block in _shards(module).items():
        refuse_saving(type(module).__name__, prefix + name, block.space)


def _loading(module: Any, state: Any, prefix: str, *unused: Any) -> None:
    for name, block in _shards(module).items():
        refuse_loading(type(module).__name__, prefix + name, block.space)


def _shards(module: Any) -> dict[str, Block]:
    """Parameters that are blocks now: not those of a forward, which are whole."""
    known = blocks(p for p in module._parameters.values() if p is not None)
    every = ((name, known.get(id(p), ())) for name, p in module._parameters.items())
    return {name: some[0] for name, some in every if some}


def refuse_optimizer_state(optimizer: Any) -> None:
    """Let an optimizer of blocks refuse ``state_dict``."""
    optimizer.register_state_dict_pre_hook(_of_blocks)


def _of_blocks(optimizer: torch.optim.Optimizer) -> None:
    raise ArgumentError(
        f"torch.optim.{type(optimizer).__name__}.state_dict: its parameters are blocks, of which "
        f"every worker has others; {_OPTIMIZERS}"
    )


def _in_words(kind: str, key: str, space: TensorSpace) -> str:
    workers = len(space.partition.workers)
    return (
        f"{key!r} of a {kind}, of shape {space.global_shape}, is in blocks on {workers} workers, "
        f"of which this one has its own"
    )
