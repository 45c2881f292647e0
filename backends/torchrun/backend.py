"""The ``torch`` backend: one process of torch.distributed per worker, NumPy arrays, messages over
gloo. For users of ``torchrun``, who need no MPI.

This module joins the processes, compares their settings, and ends them
(`linop.backends.torchrun.transport` has the messages). The module torch is imported
when the backend is asked for.
"""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from linop.backends.engine.base import Backend
from linop.backends.engine.roads.call_numbers import compare_calls
from linop.backends.engine.worker import Worker
from linop.backends.together import ancestry, builds, ending, settings
from linop.errors import BackendError, DeadlockError, LinopError, MissingExtraError, communication

try:
    import torch
    import torch.distributed as dist

    from linop.backends.torchrun.signed_store import LONGEST
    from linop.backends.torchrun.store_server import open_store
    from linop.backends.torchrun.transport import Processes
except ImportError as error:
    raise MissingExtraError(
        f"backend 'torch' needs torch: pip install 'linop-algebra[torch]' ({error})"
    ) from None

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


class Process(Worker):
    """A worker that is a process of a process group."""

    transport: Processes

    def _part(self, parts: Sequence[tuple[int, ...]], mine: tuple[int, ...]) -> Worker:
        limit, whole = self.transport.limit, self.transport.ranks
        if len(parts) == 1 and len(whole) < dist.get_world_size():
            return self  # for torch's sake, see below
        if len(whole) == dist.get_world_size():  # all processes are here, and make all groups
            groups = [_new_group(limit, [whole[w] for w in part]) for part in parts]
            group = groups[parts.index(mine)]
        else:
            # torch names a group by how many the process has made, which may differ.
            if max(map(len, parts)) > 1:
                raise BackendError(
                    "these are some of the processes of torch.distributed, whose backend cannot be "
                    "divided; divide that of all processes"
                )
            group = _new_group(limit, [whole[w] for w in mine], use_local_synchronization=True)
        transport = Processes(group, None, *_store(group, limit), limit)
        _LIVE.add(transport)
        part = Process(self.name, transport, self.debug)
        part.sums = self.sums
        return part


_VARIABLES = "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
"""Variables that `torch.distributed.init_process_group` needs, and torchrun sets."""
_KEPT: dict[Any, Process] = {}
"""Backends by the process group that they were asked for."""
_OURS: list[dist.ProcessGroup] = []
"""The default process group, if it was made here."""


def get(
    group: dist.ProcessGroup | None = None,
    wait_limit: float | None = None,
    debug: bool | None = None,
    sums: str | None = None,
) -> Process:
    """The backend of this process.

    Args:
        group: None: all processes of the default process group, of any backend, which is made (over
            gloo) if there is none. Else a process group over gloo whose messages point to point are
            linop's alone; after a failed call it cannot be used again. Worker w is its rank w. The
            first call for a group is collective; its options hold for all calls, and other `sums`
            of a later one are an error. They must be the same on all processes; None takes the
            value of the option's variable (`linop.backends.together.settings`).
        wait_limit: seconds after which a wait becomes a `DeadlockError` on every worker. Default:
            LINOP_WAIT_LIMIT, else 600.
        debug: compare all workers' calls and arguments at every call, and prove plans when they are
            compiled. Default: LINOP_DEBUG, else False.
        sums: "fixed", "exact" or "tree": see `linop.LinearOperator.compile`. Default: LINOP_SUMS,
            else "fixed", which "any" is, too.

    Raises:
        ArgumentError: an option or its variable is invalid. BackendError: options, or sources of
            linop, differ between processes, or the group's backend has other sums; on every
            process. Or there is no process group, nor are torchrun's variables set; or this process
            is not in the group, or the group is not gloo's. DeadlockError: a process does not
            arrive within the limit.
    """
    mine = settings.found("torch", wait_limit=wait_limit, debug=debug, sums=sums)
    limit = min(mine["wait_limit"].value, LONGEST)
    _initialise(limit)
    key = dist.group.WORLD if group is None else _checked(group)
    if key not in _KEPT:
        connect = partial(_new_group, limit) if group is None else None
        private = _new_group(limit) if group is None else group
        _check_sources(private, limit, connect is not None)
        transport = Processes(private, connect, *_store(private, limit), limit)
        try:
            agreed = settings.alike(transport.gather_all(mine, "compare settings"))
        except LinopError:
            transport.leave(True)
            raise
        _LIVE.add(transport)
        _KEPT[key] = Process("torch", transport, agreed["debug"])
        _KEPT[key].sums = settings.kept_sums(agreed["sums"])
    asked = settings.SUMS.found(sums).checked() if sums is not None else None
    settings.check_kept_sums(asked and settings.kept_sums(asked), _KEPT[key].sums, "process group")
    return _KEPT[key]


def launch(main: Callable[[Backend], Any], workers: int | None = None, **options: Any) -> list[Any]:
    """Run ``main(backend)`` on the first `workers` processes (default: all), with the options of
    `get`; the other processes return at once. With other `sums` than a launch before, it has a
    backend of its own, which ends with it.

    Returns:
        A list by worker: the return value of `main` on this process's entry, None elsewhere.

    Raises:
        BackendError: there are fewer processes than workers; on every process.
    """
    limit = min(settings.WAIT_LIMIT.found(options.get("wait_limit")).value, LONGEST)
    _initialise(limit)
    rank, everybody = dist.get_rank(), dist.get_world_size()
    size = everybody if workers is None else workers
    if size > everybody:
        raise BackendError(
            f"launch: {size} workers wanted, and the job has {everybody} processes; start it with "
            f"torchrun --nproc-per-node {size}"
        )
    results: list[Any] = [None] * size
    known, sums = _KEPT.get(dist.group.WORLD), options.get("sums")
    others = known is not None and sums is not None and settings.kept_sums(sums) != known.sums
    group = _new_group(limit, [*range(size)]) if size < everybody or others else None
    if rank < size:
        backend = get(group, **options)
        results[rank] = main(backend)
        counts = backend.transport.gather_all(backend.counts(), "end linop.launch")
        compare_calls(backend.transport, counts)
        if group is not None:
            leave(backend)
    return results


def leave(backend: Process) -> None:
    """End a backend and its parts, whose plans then raise; collective."""
    for part in backend.parted.values():
        assert isinstance(part, Process)
        leave(part)
    for group in [group for group, known in _KEPT.items() if known is backend]:
        del _KEPT[group]
    backend.transport.leave(True)


def _initialise(limit: float) -> None:
    """Make the default process group, unless there is one.

    Raises:
        BackendError: variables are missing, or are those of the process that has started this one.
            DeadlockError: others do not arrive.
    """
    if dist.is_initialized():
        return
    missing = [name for name in _VARIABLES if name not in os.environ]
    if missing:
        raise BackendError(
            f"backend 'torch' needs a process group: start the program with torchrun, or call "
            f"torch.distributed.init_process_group before (not set: {', '.join(missing)})"
        )
    if (process := ancestry.rank_above(ancestry.TORCH)) is not None:
        raise BackendError(
            f"a process of torch.distributed (process {process}) has started this program, which "
            f"has inherited its variables, and is none of its group. Start it without them "
            f"({', '.join(_VARIABLES)}), or run it on backend 'threads'"
        )
    with _joining(limit):
        dist.init_process_group("gloo", timeout=timedelta(seconds=limit))
    world = dist.group.WORLD
    assert world is not None
    _OURS.append(world)


def _checked(group: Any) -> dist.ProcessGroup:
    if not isinstance(group, dist.ProcessGroup):
        raise BackendError(f"group: expected a process group with this process, given {group!r}")
    if (backend := dist.get_backend(group)) != "gloo":
        raise BackendError(f"group: expected a process group over gloo, given one over {backend}")
    return group


def _new_group(limit: float, ranks: list[int] | None = None, **options: Any) -> dist.ProcessGroup:
    """A new process group over gloo, of some ranks of the default one or all; all call this."""
    with _joining(limit):
        group: dist.ProcessGroup = dist.new_group(
            ranks, timedelta(seconds=limit), "gloo", **options
        )
    return group


def _check_sources(group: dist.ProcessGroup, limit: float, ours: bool) -> None:
    """Check that all processes have the same linop; collective. A group of ours ends if not.

    Raises:
        BackendError: they have not; on every process.
    """

    def gathered(mine: bytes) -> list[bytes]:
        said = [torch.empty(len(mine), dtype=torch.uint8) for _ in range(group.size())]
        with _joining(limit):
            dist.all_gather(said, torch.frombuffer(bytearray(mine), dtype=torch.uint8), group)
        return [one.numpy().tobytes() for one in said]

    try:
        builds.check(gathered)
    except DeadlockError:
        raise
    except BackendError:
        if ours:
            dist.destroy_process_group(group)
        raise


def _store(group: dist.ProcessGroup, limit: float) -> tuple[Store, bytes]:
    """As of `open_store`; collective."""
    with _joining(limit):
        return open_store(group, limit)


@contextmanager
def _joining(limit: float) -> Iterator[None]:
    """Context in which torch's errors are those of processes that do not arrive."""
    try:
        with communication():
            yield
    except (RuntimeError, ValueError) as error:
        if isinstance(error, LinopError):
            raise
        text = str(error).partition("\n")[0]
        raise DeadlockError(
            f"waiting for all others, at most {limit:g} s, to call linop.launch, or to get the "
            f"backend 'torch': {text}"
        ) from error


_LIVE: weakref.WeakSet[Processes] = weakref.WeakSet()


def _part() -> None:
    """End of the process: tell the others."""
    live = list(_LIVE)
    for transport in live:
        transport.leave(not _ENDS.status)
    if _OURS and not _ENDS.status and dist.is_initialized():
        dist.destroy_process_group()
    if not _ENDS.status:
        _report(live)


def _report(live: Sequence[Processes]) -> None:
    """Give a process that ends well the status of a failure, if somebody else has used a store: its
    program may not have noticed."""
    for error in filter(None, (transport.channel.tampered for transport in live)):
        sys.stdout.flush()
        sys.stderr.write(f"linop: {error}\n")
        sys.stderr.flush()
        os._exit(1)


def _forked() -> None:
    """A fork has none of its parent's connections."""
    for transport in list(_LIVE):
        transport.forked()
    _LIVE.clear()
    _OURS.clear()


_ENDS = ending.install()
atexit.register(_part)
os.register_at_fork(after_in_child=_forked)
