"""The ``mpi`` backend: one rank a worker, buffers of bytes through mpi4py.

An exception, or an exit status, that leaves a process ends the whole job: the other ranks would
wait for it for ever.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from linop.backends.base import Backend
from linop.backends.execute import Program
from linop.backends.together import Choice
from linop.backends.transport import Talk, Verdict, agree
from linop.backends.worker import Worker
from linop.errors import ArgumentError, BackendError, MissingExtraError
from linop.plan import Plan

# Open MPI's component for one-sided traffic over UCX prints an error on every rank when a window is
# made, where there is no UCX device. Windows of one machine do not use it; users may say otherwise.
os.environ.setdefault("OMPI_MCA_osc", "^ucx")

try:
    from mpi4py import MPI

    from linop.backends.collective import Groups, with_collectives
    from linop.backends.ending import EndsJob
    from linop.backends.ranks import Ranks
    from linop.backends.shared import Pool, wanted
    from linop.backends.windows import NoRoomError, Windows, memory_needed
except (ImportError, RuntimeError) as error:
    raise MissingExtraError(
        f"backend 'mpi' needs mpi4py and an MPI library: pip install 'linop-algebra[mpi]' ({error})"
    ) from None

_LIMIT = 600
"""Seconds that a wait may take, where nobody says otherwise."""


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
            for a communicator is collective, for it is duplicated to keep messages apart; the
            options of that call hold for all.
        windows: False to use messages between ranks of one machine too, and not shared memory;
            by default what LINOP_WINDOWS says (0 or 1), else shared memory where it can be had.
        wait_limit: seconds after which a wait becomes a `DeadlockError` on every rank; by default
            LINOP_WAIT_LIMIT, else 600.
        debug: compare at every call what all workers call, and with what; by default LINOP_DEBUG.
        collectives: whether a group of ranks that does not share memory runs what is a collective
            by MPI's; by default what LINOP_COLLECTIVES says (0 or 1), else where it is predicted to
            be faster.
        sums: "any" to let MPI add in the order it likes, so that results may differ in their last
            bits; by default what LINOP_SUMS says, else "fixed".
    """
    comm = communicator(comm)
    known = comm.Get_attr(_CACHED)
    if isinstance(known, Backend):
        return known
    if windows is None and "LINOP_WINDOWS" in os.environ:
        windows = os.environ["LINOP_WINDOWS"] != "0"
    wait_limit, debug = settings(wait_limit, debug)
    if collectives is None and "LINOP_COLLECTIVES" in os.environ:
        collectives = os.environ["LINOP_COLLECTIVES"] != "0"
    sums = os.environ.get("LINOP_SUMS", "fixed") if sums is None else sums
    if sums not in ("fixed", "any"):
        raise ArgumentError(f"sums: expected 'fixed' or 'any', given {sums!r}")
    choice = Choice(collectives, sums == "any")
    worker = Rank(Ranks(MPI.Intracomm(comm.Dup()), wait_limit), windows, debug, choice)
    comm.Set_attr(_CACHED, worker)
    return worker


def communicator(comm: Any) -> MPI.Comm:
    """An intracommunicator that a user passed; COMM_WORLD for None.

    Raises:
        ArgumentError, BackendError: it is none.
    """
    comm = MPI.COMM_WORLD if comm is None else comm
    if not isinstance(comm, MPI.Comm):
        raise ArgumentError(f"comm: expected an mpi4py communicator, given {comm!r}")
    if comm == MPI.COMM_NULL or comm.Is_inter():
        raise BackendError("comm: expected an intracommunicator that this rank belongs to")
    return comm


def settings(wait_limit: float | None, debug: bool | None) -> tuple[float, bool]:
    """What a user said of these, or the environment."""
    if wait_limit is None:
        wait_limit = float(os.environ.get("LINOP_WAIT_LIMIT", _LIMIT))
    if debug is None:
        debug = os.environ.get("LINOP_DEBUG", "0") != "0"
    return wait_limit, debug


def launch(main: Callable[[Backend], Any], workers: int | None = None, **options: Any) -> list[Any]:
    """Run ``main(backend)`` on the first `workers` ranks (by default all), with the options of
    `get`; the others return at once.

    Returns:
        What `main` returned on this rank, in its place; None elsewhere.

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
    """`launch`, with the backends that a function gives."""
    world: MPI.Comm = MPI.COMM_WORLD
    size: int = world.size if workers is None else workers
    if size > world.size:
        raise BackendError(
            f"launch: {size} workers wanted, and the job has {world.size} ranks; start it with "
            f"mpiexec -n {size}"
        )
    results: list[Any] = [None] * size
    if size < world.size:
        world = world.Split(0 if world.rank < size else MPI.UNDEFINED, world.rank)
    if world != MPI.COMM_NULL:
        results[world.rank] = main(get(world, **options))
        if size < MPI.COMM_WORLD.size:
            world.Free()
    return results


class Rank(Worker):
    """One rank as a worker. Ranks of one machine exchange through shared memory.

    Args:
        transport: its messages.
        windows: whether shared memory is used; by default, where all ranks are on one machine.
        debug: as for `Worker`.
        choice: whether collectives are used, if this rank decides.
    """

    def __init__(self, transport: Ranks, windows: bool | None, debug: bool, choice: Choice) -> None:
        super().__init__("mpi", transport, debug)
        self._ranks = transport
        self.groups = Groups(transport)
        self._choice = choice.agreed(transport.gather_all)
        self._pool: Pool | None = None
        self._why = "shared memory is switched off" if windows is False else ""
        if not self._why and transport.workers > 1:
            here = transport.comm.Split_type(MPI.COMM_TYPE_SHARED)
            together = here.size == transport.workers
            here.Free()
            if together:
                self._pool = Pool.of(transport.comm)
                transport.listen_to(self._pool.bells)
            else:
                self._why = "the ranks are on several machines"

    def prepare(self, plan: Plan) -> None:
        """Make a new window where a plan and its adjoint do not fit into those there are."""
        if self._pool is None:
            return
        room = self._pool.room()
        said = self._ranks.gather_all(struct.pack("=3q", memory_needed(plan), *room))
        needs, *rooms = zip(*(struct.unpack("=3q", one) for one in said), strict=True)
        size = wanted(max(needs), list(zip(*rooms, strict=True)))
        if size:
            self._pool.grow(size)

    def program(
        self, plan: Plan, group: Sequence[int], tag: int, about: Callable[[], str]
    ) -> Program:
        program = None
        if self._pool is not None and self.worker in group and len(group) > 1:
            program = self._shared(plan, self._pool, group, tag, about)
        return program or with_collectives(plan, self._ranks, tag, about, self.groups, self._choice)

    def way(self, program: Program | None = None) -> str:
        if isinstance(program, Windows):
            return program.describe()
        if program is not None:
            why = self._why or "a worker lacked room in shared memory"
            return f"{program.describe()}, for {why}"
        shared = "shared memory, for all ranks are on one machine"
        likely = f"messages over MPI, for {self._why}" if self._pool is None else shared
        return f"a way chosen at the first call; likely {likely}"

    def _shared(
        self, plan: Plan, pool: Pool, group: Sequence[int], tag: int, about: Callable[[], str]
    ) -> Program | None:
        """The plan over shared memory; None, on every worker of the group, if one lacks room."""
        try:
            program = Windows(plan, pool, self._ranks.until, self._ranks.spins, about)
        except NoRoomError:
            program = None
        verdict = Verdict(votes=program is not None)
        with Talk(self._ranks, ("bind", tag)) as talk:
            me = group.index(self.worker)
            if not agree(talk, me, group, verdict, about()).votes or program is None:
                if program is not None:
                    program.release()
                return None
            offers = program.offers()
            for peer, offer in offers.items():
                talk.say(peer, offer)
            said = {
                peer: talk.hear(peer, partial("worker {} to bind {}".format, peer, about()))
                for peer in offers
            }
        program.connect(said)
        return program


def _free(comm: MPI.Comm, keyval: int, worker: Rank) -> None:
    del comm, keyval
    worker.ended = True
    if not MPI.Is_finalized():
        worker.groups.close()
        worker.transport.leave()  # type: ignore[attr-defined]


_CACHED = MPI.Comm.Create_keyval(delete_fn=_free)
"""Attribute under which a communicator keeps its backend, so that it is duplicated once."""


if MPI.COMM_WORLD.size > 1:
    EndsJob()
