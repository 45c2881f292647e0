"""States of distributed models on disk: in one file, as torch.save writes the sequential one; or in
a folder, as torch's distributed checkpointing does, where each worker writes its own blocks.

Either can be loaded by another number of workers, with other partitions, and by torch alone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from linop.errors import ArgumentError
from linop.layers.optimizer_state import Optimized, collect_optimizer, spread_optimizer
from linop.layers.parts import MODEL, OPTIMIZER
from linop.layers.state import Workers, collect, spread


def save(
    model: Any, path: str | os.PathLike[str], optimizer: Any = None, *, sharded: bool = False
) -> None:
    """Save the state of a distributed model. Collective.

    Args:
        model: the module of this worker.
        path: of a file; if `sharded`, of a folder, which all workers see.
        optimizer: this worker's, over its parameters, to be saved too; None on workers without
            parameters. What is saved is then a dict of "model" and "optimizer".
        sharded: every worker writes its own blocks, in the format of torch.distributed.checkpoint;
            otherwise worker 0 writes the sequential state with torch.save.

    Raises:
        LinopError: the state cannot be gathered (see `gather_state`, `gather_optimizer_state`) or
            written; on every worker.
    """
    workers = Workers("save", model)
    optimized = _optimized(workers, optimizer)
    if sharded:
        from linop.layers.sharded import save_parts  # torch's part of it takes a second to import

        save_parts(workers, optimized, Path(path))
        return
    state: Any = collect(workers, list(workers.parts.values()), 0)
    if optimized is not None:
        state = {MODEL: state, OPTIMIZER: collect_optimizer(optimized, 0)}
    workers.each(lambda: _write(state, Path(path)) if workers.worker == 0 else None)


def load(model: Any, path: str | os.PathLike[str], optimizer: Any = None) -> None:
    """Load what `save` saved, with any number of workers, into a model with any partitions; or what
    torch saved of the sequential model, in the same form. Collective.

    Args:
        model: the module of this worker.
        path: a file, which worker 0 reads; or a folder, where every worker reads its own blocks.
        optimizer: this worker's, over its parameters, to be loaded too; None on workers without
            parameters.

    Raises:
        ArgumentError, ShapeError: the state is not the model's, or has no optimizer's.
        BackendError: it cannot be read. All on every worker.
    """
    workers = Workers("load", model)
    optimized = _optimized(workers, optimizer)
    if workers.meeting.told(Path(path).is_dir())[0]:
        from linop.layers.sharded import load_parts

        load_parts(workers, optimized, Path(path))
        return
    whole = workers.each(lambda: _read(Path(path)) if workers.worker == 0 else None)
    both = workers.meeting.told(whole is not None and _has_optimizer(whole))[0]
    if optimized is not None and not both:
        raise ArgumentError(f"load: {os.fspath(path)!r} has no state of an optimizer")
    state = whole[MODEL] if both and whole is not None else whole
    spread(workers, list(workers.parts.values()), state)
    if optimized is not None:
        spread_optimizer(optimized, None if whole is None else whole[OPTIMIZER])


def _optimized(workers: Workers, optimizer: Any) -> Optimized | None:
    """The optimizers of all workers, if any of them has one."""
    some = any(workers.meeting.told(optimizer is not None))
    return Optimized(workers, optimizer) if some else None


def _has_optimizer(state: Mapping[str, Any]) -> bool:
    return all(isinstance(state.get(name), Mapping) for name in (MODEL, OPTIMIZER))


def _write(state: Any, path: Path) -> None:
    # Beside it first: what is there stays whole until the new one is.
    beside = path.with_name(path.name + ".part")
    torch.save(state, beside)
    beside.replace(path)


def _read(path: Path) -> Any:
    state = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(state, Mapping):
        raise ArgumentError(f"a {type(state).__name__} in {str(path)!r}; a state_dict expected")
    return state
