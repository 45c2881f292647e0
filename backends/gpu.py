"""The ``cupy`` backend: one rank a worker, arrays on GPUs, messages through mpi4py.

Where the MPI library takes pointers to a GPU's memory it is given them; else messages are staged
through main memory. `linop.backends.device.staging` says when the host waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from linop.backends import settings
from linop.backends.base import Backend
from linop.backends.device.device_arrays import DeviceArrays, cupy_arrays
from linop.backends.execution.program import Program
from linop.backends.mpi import communicator, joined_alike, launch_by
from linop.backends.transports.transport import rebuilt
from linop.backends.worker import Worker
from linop.errors import BackendError, LinopError
from linop.planning.plan import Plan

# isort: split
from mpi4py import MPI

from linop.backends.device.cuda_aware import Answer, asked, tried
from linop.backends.device.staging import DeviceMessages, way
from linop.backends.jobs.lifetime import FREED, end, watch
from linop.backends.transports.mpi_transport import Ranks

_SAID = 400
"""Bytes of an error, as a rank tells it the others."""


def get(
    comm: Any = None,
    way: str | None = None,
    device: int | None = None,
    wait_limit: float | None = None,
    debug: bool | None = None,
    arrays: DeviceArrays | None = None,
) -> Backend:
    """The backend of this rank. It makes the rank's GPU the current one of this thread.

    Args:
        comm: an intracommunicator, COMM_WORLD by default; worker w is its rank w. The first call
            for a communicator is collective, for it is duplicated; the options of that call hold
            for all. `way`, `wait_limit` and `debug` have to be the same on all ranks.
        way: "aware" to give MPI the device's memory, whatever it says of itself (an MPI that cannot
            read it ends the process); "staged" to send from main memory; "auto", which is the
            default unless LINOP_GPU_WAY says otherwise, to find out.
        device: the number of the GPU; by default the rank's number on its machine, modulo the GPUs
            that are there, so that ranks share one where there are more of them.
        wait_limit, debug: as of the backend ``mpi``.
        arrays: others than CuPy's: those of a module that has its names.

    Raises:
        BackendError, MissingExtraError: a rank finds no GPU, or no CuPy; on every rank.
            ArgumentError: a setting is wrong. BackendError: ranks have different ones.
    """
    comm = communicator(comm)
    known = comm.Get_attr(_CACHED)
    if isinstance(known, Backend):
        return known
    mine = settings.found("cupy", way=way, wait_limit=wait_limit, debug=debug)
    transport, agreed = joined_alike(comm, mine)
    try:
        found = _found(transport, device, arrays)
        choice = _chosen(transport, found, agreed["way"])
    except BaseException:
        transport.leave()
        raise
    worker = Gpu(transport, found, choice, agreed["debug"])
    comm.Set_attr(_CACHED, worker)
    watch(worker)
    return worker


def launch(main: Callable[[Backend], Any], workers: int | None = None, **options: Any) -> list[Any]:
    """As `linop.backends.mpi.launch`, with the options of `get`."""
    return launch_by(get, main, workers, options)


def _found(transport: Ranks, device: int | None, arrays: DeviceArrays | None) -> DeviceArrays:
    """The arrays, with this rank's GPU the current one; collective, for all ranks need one."""
    problem: LinopError | None = None
    transport.gather_all(b"")  # all have come
    here = transport.comm.Split_type(MPI.COMM_TYPE_SHARED)
    number = here.rank
    here.Free()
    try:
        arrays = arrays or cupy_arrays()
        arrays.use(number, device)
    except LinopError as error:
        problem = error
    text = f"{type(problem).__name__}\n{problem}" if problem is not None else ""
    said = transport.gather_all(text.encode()[:_SAID].ljust(_SAID))
    for worker, data in enumerate(said):
        kind, _, words = data.decode(errors="ignore").rstrip().partition("\n")
        if kind:
            raise rebuilt(kind, f"worker {worker}: {words}")
    assert arrays is not None
    return arrays


def _chosen(transport: Ranks, arrays: DeviceArrays, wanted: str) -> Answer:
    """Whether MPI is given the device's memory, and why: the same on all ranks."""
    if wanted == "staged":
        return Answer(False, "asked for")
    if wanted == "aware":
        answer = tried(transport, arrays)
        if not answer.yes:
            raise BackendError(f"way 'aware': {answer.why}; use way='staged'")
        return Answer(True, f"asked for, and {answer.why}")
    answer = asked()
    said = transport.gather_all(bytes([answer.yes]))
    if not all(any(one) for one in said):
        silent = [worker for worker, one in enumerate(said) if not any(one)]
        return Answer(False, answer.why if not answer.yes else f"no support on workers {silent}")
    return tried(transport, arrays)


class Gpu(Worker):
    """One rank as a worker, with a GPU.

    Attributes:
        aware: whether MPI is given the device's memory, and why.
    """

    def __init__(self, transport: Ranks, arrays: DeviceArrays, aware: Answer, debug: bool) -> None:
        super().__init__("cupy", transport, debug, arrays)
        self._ranks = transport
        self._device = arrays
        self.aware = aware

    def program(
        self, plan: Plan, group: Sequence[int], tag: int, about: Callable[[], str]
    ) -> Program:
        yes, calls = self.aware.yes, self.calls(group)
        return DeviceMessages(plan, self._ranks, tag, about, self._device, yes, calls)

    def leave(self) -> None:
        """Free the communicator of this backend; collective."""
        self._ranks.leave()

    def way(self, program: Program | None = None) -> str:
        del program
        return f"{way(self.aware.yes)}: {self.aware.why}"


def _free(comm: MPI.Comm, keyval: int, worker: Gpu) -> None:
    del comm, keyval
    end(worker, FREED, worker.leave)


_CACHED = MPI.Comm.Create_keyval(delete_fn=_free)
"""Attribute under which a communicator keeps this backend, beside that of the name ``mpi``."""
