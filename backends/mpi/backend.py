"""The ``mpi`` backend: one rank per worker, NumPy arrays, messages as bytes through mpi4py.

This module joins the ranks, compares their settings, and chooses a plan's transport: shared-memory
windows, MPI collectives or point-to-point messages.

An uncaught exception, or a nonzero exit status, of one process ends the whole job: the other ranks
would wait for it forever.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from linop.backends.engine.base import Backend, BoundPlan
from linop.backends.engine.execution.program import Program
from linop.backends.engine.roads.call_numbers import compare_calls
from linop.backends.engine.worker import Board, Worker
from linop.backends.mpi.starting import check_running, start_mpi
from linop.backends.together import ending, settings
from linop.backends.together.agreement import Talk, Verdict, agree
from linop.backends.together.transport import Awaited
from linop.errors import ArgumentError, BackendError, LinopError, MissingExtraError
from linop.operators.operator import LinearOperator
from linop.planning.collective_selection import Choice, selected
from linop.planning.passes import Options
from linop.planning.placement import Placement
from linop.planning.plan import LoweredPlan

# Open MPI's component for one-sided traffic over UCX prints an error on every rank when a window is
# made, where there is no UCX device. Windows of one machine do not use it; users may say otherwise.
os.environ.setdefault("OMPI_MCA_osc", "^ucx")
# UCX, in MPICH and others, gives up TCP connections that do not answer its probes. After a cable
# was cut for 60 s, MPICH then ended by a segmentation fault.
os.environ.setdefault("UCX_TCP_KEEPIDLE", "inf")

try:
    start_mpi()
    from mpi4py import MPI

    from linop.backends.engine.roads.point_to_point import PointToPoint
    from linop.backends.mpi.collectives import Collectives, Groups, taken_stages
    from linop.backends.mpi.hybrid import Hybrid
    from linop.backends.mpi.joining import duplicated, joined, part
    from linop.backends.mpi.lifetime import RankWorker, kept, new_key
    from linop.backends.mpi.shared_memory.board import board_of
    from linop.backends.mpi.shared_memory.plan_memory import NoRoomError, memory_needed
    from linop.backends.mpi.shared_memory.pool import NoWindowError, Pool, wanted
    from linop.backends.mpi.shared_memory.windows import Windows
    from linop.backends.mpi.transport import Ranks
except LinopError:
    raise
except (ImportError, RuntimeError) as error:
    raise MissingExtraError(
        f"backend 'mpi' needs mpi4py and an MPI library: pip install 'linop-algebra[mpi]' ({error})"
    ) from None

_OFFERED = 3
"""Progress of binding a plan (for `Talk.awaited`) at which workers have sent their offers of shared
memory; the vote before it counts as 1 and 2."""

_EAGER = 65_000
"""Bytes of a message that both MPI libraries send at once over TCP: less than 64 KiB, with their
header. A longer one waits for an answer of its receiver."""


def get(
    comm: MPI.Comm | None = None,
    windows: bool | None = None,
    wait_limit: float | None = None,
    debug: bool | None = None,
    collectives: bool | None = None,
    sums: str | None = None,
) -> Backend:
    """The backend of this rank.

    Args:
        comm: an intracommunicator, COMM_WORLD by default; worker w is its rank w. The first call
            for a communicator is collective, since it is duplicated to separate its messages; the
            options of that call hold for all; other `sums` of a later one are an
            error. They must be the same on all ranks; None takes the value of the option's variable
            (`linop.backends.together.settings`).
        windows: False: messages between ranks of one machine too. Default: LINOP_WINDOWS, else
            shared memory where it is available.
        wait_limit: seconds after which a wait becomes a `DeadlockError` on every rank. Default:
            LINOP_WAIT_LIMIT, else 600.
        debug: compare all workers' calls and arguments at every call, and prove plans when they are
            compiled. Default: LINOP_DEBUG, else False.
        collectives: True: groups of ranks without shared memory run collectives by MPI's. Default:
            LINOP_COLLECTIVES, else where they are predicted to be faster.
        sums: "any": MPI chooses the order of summation, so that last bits may differ between runs;
            "exact" or "tree": see `linop.LinearOperator.compile`. Default: LINOP_SUMS, else
            "fixed".

    Raises:
        ArgumentError: an option or its variable is invalid. BackendError: options differ between
            ranks; or the communicator's backend has other sums. All on every rank.
    """
    comm = communicator(comm)

    def made() -> Rank:
        given = {"windows": windows, "collectives": collectives, "sums": sums}
        mine = settings.found("mpi", wait_limit=wait_limit, debug=debug, **given)
        transport, agreed = joined_alike(comm, mine)
        choice = Choice(agreed["collectives"], agreed["sums"] == "any")
        return Rank(transport, agreed, choice)

    backend = kept(comm, _KEY, made)
    assert isinstance(backend, Rank)
    settings.check_kept_sums(sums, backend.wanted_sums, "communicator")
    return backend


def communicator(comm: Any) -> MPI.Comm:
    """A user's intracommunicator, validated; COMM_WORLD for None.

    Raises:
        ArgumentError: not an mpi4py communicator. BackendError: COMM_NULL, or an intercommunicator.
    """
    check_running(MPI)
    comm = MPI.COMM_WORLD if comm is None else comm
    if not isinstance(comm, MPI.Comm):
        raise ArgumentError(f"comm: expected an mpi4py communicator, given {comm!r}")
    if comm == MPI.COMM_NULL or comm.Is_inter():
        raise BackendError("comm: expected an intracommunicator that this rank belongs to")
    return comm


def joined_alike(comm: MPI.Comm, mine: settings.Founds) -> tuple[Ranks, dict[str, Any]]:
    """The transport of this rank, and the settings common to all ranks; collective.

    Raises:
        ArgumentError, BackendError: as `linop.backends.together.settings.alike`, on every rank.
            DeadlockError: a rank does not arrive within the wait limit.
    """
    transport = joined(comm, mine["wait_limit"].value)
    said = transport.gather_all(mine, "compare settings")
    try:
        return transport, settings.alike(said)
    except LinopError as error:
        transport.give_up(error)
        raise


def launch(main: Callable[[Backend], Any], workers: int | None = None, **options: Any) -> list[Any]:
    """Run ``main(backend)`` on the first `workers` ranks (default: all), with the options of `get`;
    the other ranks return at once. With other `sums` than a launch before, it has a backend of its
    own, which ends with it.

    Returns:
        A list by worker: the return value of `main` on this rank's entry, None elsewhere.

    Raises:
        BackendError: there are fewer ranks than workers; on every rank.
    """
    return launch_by(get, main, workers, options)


def launch_by(
    get: Callable[..., Backend],
    main: Callable[[Backend], Any],
    workers: int | None,
    options: dict[str, Any],
) -> list[Any]:
    """`launch` with backends from a given ``get`` function."""
    check_running(MPI)
    world: MPI.Comm = MPI.COMM_WORLD
    started = os.environ.get("PMI_SIZE", "1")
    if workers is None and world.size == 1 and started != "1":
        raise BackendError(
            f"launch: {started} processes were started, and this MPI library finds one: each would "
            "run the whole program. Under Slurm, Open MPI needs srun --mpi=pmix, MPICH --mpi=pmi2; "
            "else use the mpiexec of this MPI library"
        )
    size: int = world.size if workers is None else workers
    if size > world.size:
        raise BackendError(
            f"launch: {size} workers wanted, and the job has {world.size} ranks; start it with "
            f"mpiexec -n {size}"
        )
    results: list[Any] = [None] * size
    limit = settings.WAIT_LIMIT.found(options.get("wait_limit")).value
    known = world.Get_attr(_KEY)
    if size < world.size:
        meeting = duplicated(world, limit)  # all ranks have arrived: Split does not block
        world = meeting.Split(0 if world.rank < size else MPI.UNDEFINED, world.rank)
        meeting.Free()
    elif isinstance(known, Rank) and options.get("sums") not in (None, known.wanted_sums):
        world = duplicated(world, limit)
    if world != MPI.COMM_NULL:
        backend = get(world, **options)
        results[world.rank] = main(backend)
        if isinstance(backend, Worker):
            counts = backend.transport.gather_all(backend.counts(), "end linop.launch")
            compare_calls(backend.transport, counts)
        if world is not MPI.COMM_WORLD:
            world.Free()
    return results


def machine_of(comm: MPI.Intracomm) -> int:
    """The lowest rank on this rank's machine; collective."""
    here = comm.Split_type(MPI.COMM_TYPE_SHARED)
    first = np.array([comm.rank])
    here.Bcast(first)
    here.Free()
    return int(first[0])


class Rank(RankWorker):
    """One rank as a worker. Ranks of one machine exchange through shared memory.

    Attributes:
        machines: the lowest rank on each rank's machine, by rank.
        wanted_sums: the option, of which ``sums`` is what plans know.

    Args:
        transport: transport of its messages and control channels.
        options: settings, as all ranks agreed on them.
        choice: selection of MPI collectives.
    """

    def __init__(self, transport: Ranks, options: dict[str, Any], choice: Choice) -> None:
        super().__init__(get, options, transport)
        windows = options["windows"]
        self.wanted_sums: str = options["sums"]
        self.sums = settings.kept_sums(self.wanted_sums)
        self.groups = Groups(transport)
        self._choice = choice
        self._pool: Pool | None = None
        self._why = "" if windows else "shared memory is switched off"
        self.machines = transport.gather_all(machine_of(transport.comm), "compare machines")
        if len(set(self.machines)) > 1:
            self.placement = Placement(self.machines)
            mine = self.machines[self.worker]
            transport.eager = {w: _EAGER for w, one in enumerate(self.machines) if one != mine}
        if windows and len(set(self.machines)) < transport.workers:
            self._share()
        elif windows:
            alone = transport.workers == 1
            self._why = "there is one rank" if alone else "the ranks are on several machines"

    def _share(self) -> None:
        here = [w for w, one in enumerate(self.machines) if one == self.machines[self.worker]]
        try:
            self._pool = Pool.of(self.transport.comm, self.transport.gather_all, here)
        except NoWindowError as error:
            self._why = f"there is no shared memory: {error}"
        else:
            self.transport.listen_to(self._pool.bells)

    def board(self, doing: str) -> Board | None:
        shared = self._pool is not None and len(set(self.machines)) == 1
        return board_of(self, doing) if shared else None

    def _agreed(self, op: LinearOperator) -> BoundPlan:
        if self._pool is not None:
            self._pool.retire()
        return super()._agreed(op)

    def prepare(self, plan: LoweredPlan) -> None:
        """Allocate a new shared-memory window if a plan and its adjoint do not fit into the
        existing ones; collective."""
        if self._pool is None:
            return
        self._pool.reclaim()  # no worker runs a plan until the exchange below
        said = self.transport.gather_all((memory_needed(plan), self._pool.room()))
        size = wanted(max(need for need, _ in said), [room for _, room in said])
        if size:
            self._pool.grow(self.transport.gather_all, size)

    @property
    def options(self) -> Options:
        return replace(super().options, collectives=lambda plan: selected(plan, self._choice))

    def program(
        self,
        plan: LoweredPlan,
        group: Sequence[int],
        tag: int,
        about: Callable[[], str],
        numbered: bool = True,
    ) -> Program:
        program = None
        shared = len({self.machines[worker] for worker in group}) < len(group)
        if self._pool is not None and self.worker in group and shared:
            program = self._shared(plan, self._pool, group, tag, about, numbered)
        return program or self._messages(plan, group, tag, about, numbered)

    def _messages(
        self,
        plan: LoweredPlan,
        group: Sequence[int],
        tag: int,
        about: Callable[[], str],
        numbered: bool,
    ) -> Program:
        stages, reasons = taken_stages(plan, self.groups, self._choice)
        patterns = {stage: found for stage, (found, _) in stages.items()}
        layout = self.layout(plan, replace(self.options, collectives=lambda plan: patterns))
        calls = self.calls(group, numbered)
        how = Collectives(layout, self.transport, tag, about, calls, self.groups, stages, reasons)
        return Program(layout, how, calls)

    def leave(self) -> None:
        self.groups.close()
        super().leave()

    def way(self, program: Program | None = None) -> str:
        if program is not None and isinstance(program.messages, Windows | Hybrid):
            return program.describe()
        if program is not None:
            room = "a worker lacked room in shared memory"
            apart = "its workers share no machine, or "
            why = self._why or (apart if self.placement is not None else "") + room
            return f"{program.describe()}, for {why}"
        shared = "shared memory, for all ranks are on one machine"
        if len(set(self.machines)) > 1:
            shared = "shared memory inside each machine, and messages over MPI between machines"
        likely = f"messages over MPI, for {self._why}" if self._pool is None else shared
        return f"a way chosen at the first call; likely {likely}"

    def _shared(
        self,
        plan: LoweredPlan,
        pool: Pool,
        group: Sequence[int],
        tag: int,
        about: Callable[[], str],
        numbered: bool,
    ) -> Program | None:
        """The plan bound to shared-memory windows, with messages to other machines; None on every
        worker of the group if one lacks room."""
        calls = self.calls(group, numbered)
        assert calls is not None  # the group has several workers
        layout = self.layout(plan, super().options)
        transport = self.transport
        machines = [self.machines[worker] for worker in group]
        here = [w for w in group if self.machines[w] == self.machines[self.worker]]
        near = layout if len(set(machines)) == 1 else layout.part(here)
        windows: Windows | None = None
        with suppress(NoRoomError):
            waits = transport.until, transport.spins
            windows = Windows(near, pool, *waits, about, calls, small_stay=near is not layout)
        verdict = Verdict(votes=windows is not None)
        with Talk(transport, ("bind", tag)) as talk:
            me = group.index(self.worker)
            if not agree(talk, me, group, verdict, f"bind {about()}").votes or windows is None:
                if windows is not None:
                    windows.release()
                return None
            offers = windows.offers()
            for peer, offer in offers.items():
                talk.say(peer, offer)

            def who(peer: int) -> Awaited:
                return talk.awaited(f"worker {peer} to bind {about()}", peer, _OFFERED, _OFFERED)

            said = {peer: talk.hear(peer, partial(who, peer)) for peer in offers}
        windows.connect(said)
        if near is layout:
            return Program(layout, windows, calls)
        far = layout.part([worker for worker in group if worker not in here])
        messages = PointToPoint(far, transport, tag, about, calls, beside=True)
        return Program(layout, Hybrid(layout, windows, messages), calls)


_KEY = new_key()
ending.at_end.append(part)
if MPI.COMM_WORLD.size > 1:
    ending.install()
