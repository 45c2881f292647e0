"""States of distributed models on disk: in one file, as torch.save writes the sequential one; or in
a folder, as torch's distributed checkpointing does, where each worker writes its own blocks.

Either can be loaded by another number of workers, with other partitions, and by torch alone. A save
replaces an earlier state atomically, once the new one is on the disk. A load checks everything
before it changes anything of the model; no file that it reads can run code.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from linop.errors import ArgumentError
from linop.layers.state.files import check_sealed, clear_partial, replacing, seal, sync_folder
from linop.layers.state.limits import Limits, bytes_of
from linop.layers.state.optimizer_state import (
    Optimized,
    check_options,
    collect_optimizer,
    staged_optimizer,
)
from linop.layers.state.reading import loaded, named, regular
from linop.layers.state.sharded_load import load_sharded
from linop.layers.state.state import collect, source_of, spread
from linop.layers.state.state_tensors import MODEL, OPTIMIZER
from linop.layers.state.workers import Workers
from linop.writing import target

Writing = Generator[Callable[[], Any], Callable[[], Any], None]
"""A save: what this worker has to write, without the others, is yielded once, and a function is
sent back that gives its result, or raises."""


def save(
    model: Any,
    path: str | bytes | os.PathLike[Any],
    optimizer: Any = None,
    *,
    sharded: bool = False,
) -> None:
    """Save the state of a distributed model. Collective.

    Args:
        model: the module of this worker.
        path: of a regular file; if `sharded`, of a folder, which all workers see. The file, or the
            checkpoint in the folder, is replaced when the new one is written and synced: there has
            to be room for both. Links are followed; the file keeps its owner and mode.
        optimizer: this worker's, over its parameters, to be saved too; None on workers without
            parameters. The saved state is then a dict of "model" and "optimizer".
        sharded: every worker writes its own blocks, in the format of torch.distributed.checkpoint;
            otherwise worker 0 writes the sequential state with torch.save.

    Raises:
        LinopError: the state cannot be gathered (see `gather_state`, `gather_optimizer_state`) or
            written; on every worker. An earlier checkpoint at the path stays.

    Example:
        >>> import tempfile
        >>> P, folder = linop.Partition((1, 2)), tempfile.TemporaryDirectory()
        >>> file = f"{folder.name}/net.pt"
        >>> _ = linop.launch(lambda b: layers.save(layers.Linear(P, 4, 2), file), workers=2)
        >>> {name: list(x.shape) for name, x in torch.load(file).items()}
        {'weight': [2, 4], 'bias': [2]}
        >>> folder.cleanup()
    """
    _finish(_saving(model, path, optimizer, sharded, copies=False))


class Saving:
    """A save that goes on beside the program, as `save_async` begins it.

    Example:
        >>> import tempfile
        >>> P, folder = linop.Partition((1, 2)), tempfile.TemporaryDirectory()
        >>> def main(backend):
        ...     saving = layers.save_async(layers.Linear(P, 4, 2), f"{folder.name}/net.pt")
        ...     saving.wait()  # training may go on before
        ...     return saving.done
        >>> linop.launch(main, workers=2)
        [True, True]
        >>> folder.cleanup()
    """

    def __init__(self, steps: Writing) -> None:
        self._steps: Writing | None = steps
        work = next(steps)
        self._outcome: Future[Any] = Future()
        # Not a daemon: what was begun is written before the process ends.
        Thread(target=self._run, args=(work,), name="linop.layers.save_async").start()

    def _run(self, work: Callable[[], Any]) -> None:
        try:
            self._outcome.set_result(work())
        except BaseException as error:
            self._outcome.set_exception(error)

    @property
    def done(self) -> bool:
        """True when this worker has written its part, or failed."""
        return self._outcome.done()

    def wait(self) -> None:
        """Wait for the save, and let it count: a folder's checkpoint is replaced here. Collective;
        nothing at later calls.

        Raises:
            LinopError: it could not be written; on every worker. An earlier checkpoint at the path
                stays.
        """
        steps, self._steps = self._steps, None
        if steps is not None:
            _send(steps, self._outcome.result)


def save_async(
    model: Any,
    path: str | bytes | os.PathLike[Any],
    optimizer: Any = None,
    *,
    sharded: bool = False,
) -> Saving:
    """`save` with the same arguments, of copies that are made now: training goes on while a thread
    writes them. Collective, as its ``wait`` is.

    There is room for a copy of what this worker writes: of the whole state on worker 0; if
    `sharded`, of its blocks.

    Returns:
        The save; call ``wait()`` on every worker, at the latest before the next one.

    Raises:
        LinopError: as `save`, of what fails before anything is written; on every worker.

    Example:
        >>> import tempfile
        >>> P, folder = linop.Partition((1, 2)), tempfile.TemporaryDirectory()
        >>> file = f"{folder.name}/net.pt"
        >>> def main(backend):
        ...     layers.save_async(layers.Linear(P, 4, 2), file).wait()  # after other steps
        >>> _ = linop.launch(main, workers=2)
        >>> {name: list(x.shape) for name, x in torch.load(file).items()}
        {'weight': [2, 4], 'bias': [2]}
        >>> folder.cleanup()
    """
    return Saving(_saving(model, path, optimizer, sharded, copies=True))


def _saving(model: Any, path: Any, optimizer: Any, sharded: bool, copies: bool) -> Writing:
    """The steps of a save."""
    workers = Workers("save", model, optimizer)
    where = workers.each(lambda: named(path))
    workers.each(lambda: where if sharded else target(path))
    workers.need_memory()
    optimized = _optimized(workers, optimizer)
    if optimized is not None:
        check_options(optimized)
    if sharded:
        # Here: torch's module for it takes a second to import.
        from linop.layers.state.sharded_save import save_sharded

        yield from save_sharded(workers, optimized, where, copies)
        return
    state: Any = collect(workers, list(workers.tensors.values()), 0)
    if optimized is not None:
        state = {MODEL: state, OPTIMIZER: collect_optimizer(optimized, 0)}
    if copies:
        state = tree_map_only(torch.Tensor, torch.Tensor.clone, state)
    workers.each((yield lambda: write_state(state, where) if workers.worker == 0 else None))


def _finish(steps: Writing) -> None:
    """Go through the steps of a save, one after the other."""
    _send(steps, next(steps))


def _send(steps: Writing, outcome: Callable[[], Any]) -> None:
    with suppress(StopIteration):
        steps.send(outcome)


def load(model: Any, path: str | bytes | os.PathLike[Any], optimizer: Any = None) -> None:
    """Load a state that `save` has saved on any number of workers, into a model with any
    partitions; or one that torch has saved of the sequential model, in the same format. Collective.

    Everything is read and checked before anything is changed: `save` writes digests, torch CRCs. A
    model on the meta device gets memory of the backend's device. Files are data: an object in them
    that is neither a tensor, a number, a string nor a container of these is refused.

    Args:
        model: the module of this worker.
        path: a file, which worker 0 reads; or a folder, where every worker reads its own blocks.
        optimizer: this worker's, over its parameters, to be loaded too; None on workers without
            parameters.

    Raises:
        ArgumentError, ShapeError: the state is not the model's, or has no optimizer's.
        BackendError: it cannot be read, is damaged, or refers to other objects. All on every
            worker; the model and the optimizer are as before.

    Example:
        >>> import tempfile
        >>> P, folder = linop.Partition((1, 2)), tempfile.TemporaryDirectory()
        >>> torch.save({"weight": torch.arange(4.0).view(1, 4)}, f"{folder.name}/net.pt")
        >>> def main(backend):
        ...     linear = layers.Linear(P, 4, 1, bias=False)
        ...     layers.load(linear, f"{folder.name}/net.pt")
        ...     return linear.weight.tolist()
        >>> linop.launch(main, workers=2)
        [[[0.0, 1.0]], [[2.0, 3.0]]]
        >>> folder.cleanup()
    """
    workers = Workers("load", model, optimizer)
    where = workers.each(lambda: named(path))
    optimized = _optimized(workers, optimizer)
    if workers.gather_objects(os.path.isdir(where))[0]:  # False where it may not be seen
        load_sharded(workers, optimized, where)
        return
    wanted = bytes_of(workers.tensors.values())
    whole = workers.each(lambda: read_state(where, wanted) if workers.worker == 0 else None)
    both = workers.gather_objects(whole is not None and has_optimizer(whole))[0]
    if optimized is not None and not both:
        raise ArgumentError(f"load: {str(where)!r} has no state of an optimizer")
    state = whole[MODEL] if both and whole is not None else whole
    items = list(workers.tensors.values())
    source = source_of(workers, items, state)
    staged = None
    if optimized is not None:
        staged = staged_optimizer(optimized, None if whole is None else whole[OPTIMIZER])
        workers.each(lambda: optimized.check(*staged))
    workers.materialise()
    spread(workers, items, state, source)
    if optimized is not None and staged is not None:
        hypers, kept = staged
        workers.each(lambda: optimized.install(hypers, kept))


def _optimized(workers: Workers, optimizer: Any) -> Optimized | None:
    """The optimizers of all workers, if any of them has one."""
    some = any(workers.gather_objects(optimizer is not None))
    return Optimized(workers, optimizer) if some else None


def has_optimizer(state: Mapping[str, Any]) -> bool:
    """True if a checkpoint has the state of an optimizer beside that of its model."""
    return all(isinstance(state.get(name), Mapping) for name in (MODEL, OPTIMIZER))


def write_state(state: Any, path: Path) -> None:
    """Write a sequential state to a file, atomically, as `replacing` does."""
    with replacing(path) as file:
        torch.save(state, file)
        seal(file)
    written = target(path)
    sync_folder(written.parent)
    clear_partial(written)


def read_state(path: Path, wanted: int) -> Any:
    """The sequential state in a file, checked.

    Args:
        wanted: bytes of the model's tensors, which limit those of the file.

    Raises:
        ArgumentError: it is no mapping. BackendError, and errors of torch.load: it cannot be read,
            or exceeds a limit.
    """
    limits = Limits(wanted)
    with regular(path) as file:
        limits.take(os.fstat(file.fileno()).st_size, str(path))
        check_sealed(file, path, limits.check_time)
        state = loaded(file, str(path), limits)
    if not isinstance(state, Mapping):
        raise ArgumentError(f"a {type(state).__name__} in {str(path)!r}; a state_dict expected")
    return state
