"""The ``cupy`` backend: one rank per worker, arrays on GPUs, messages through mpi4py or NCCL.

A CUDA-aware MPI library gets pointers to device memory; otherwise messages are staged through host
memory (`linop.backends.mpi.device.staging`, which also states when the host waits for the device),
or go through NCCL (`linop.backends.mpi.device.nccl_messages`). This module chooses the device and
the way of each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from linop.backends.device.device_arrays import DeviceArrays, cupy_arrays
from linop.backends.engine.base import Backend
from linop.backends.engine.execution.program import Program
from linop.backends.engine.roads.communication import Communication
from linop.backends.engine.worker import Board
from linop.backends.mpi.backend import communicator, joined_alike, launch_by, machine_of
from linop.backends.together import settings
from linop.backends.together.meeting import OnTransport
from linop.errors import BackendError
from linop.planning.plan import LoweredPlan

# isort: split
from mpi4py import MPI

from linop.backends.mpi.device.cuda_aware import Answer, asked, tried
from linop.backends.mpi.device.nccl import Nccl, opened, version
from linop.backends.mpi.device.nccl_messages import WAY, NcclMessages
from linop.backends.mpi.device.sharing import gpu_here, sharing
from linop.backends.mpi.device.staging import DeviceMessages, way
from linop.backends.mpi.lifetime import RankWorker, kept, new_key
from linop.backends.mpi.shared_memory.board import board_of
from linop.backends.mpi.transport import Ranks


def get(
    comm: Any = None,
    way: str | None = None,
    device: int | None = None,
    wait_limit: float | None = None,
    debug: bool | None = None,
    arrays: DeviceArrays | None = None,
) -> Backend:
    """The backend of this rank. It makes the rank's GPU the current device of this thread.

    Args:
        comm: an intracommunicator, COMM_WORLD by default; worker w is its rank w. The first call
            for a communicator is collective, since it is duplicated; the options of that call hold
            for all. `way`, `wait_limit` and `debug` must be the same on all ranks.
        way: "aware": pass device memory to MPI, whatever it reports (an MPI library that cannot
            read it ends the process). "staged": send from host memory. "nccl": send by NCCL, for
            ranks with a GPU each; calls, `start` and `finish` have one order on all workers, those
            of all threads together. "auto", the default unless LINOP_GPU_WAY is set: query and
            test the library, and choose "aware" or "staged"; "staged" where ranks share a GPU,
            since messages between processes on one GPU are slower than through host memory.
        device: index of the GPU; by default the rank's number on its machine, modulo the number of
            GPUs, so that ranks share a GPU if there are more of them.
        wait_limit, debug: as of the backend ``mpi``.
        arrays: another array module with CuPy's names.

    Raises:
        BackendError, MissingExtraError: a rank finds no GPU, or no CuPy; or, if asked for, no NCCL,
            or shares its GPU with another; on every rank. ArgumentError: a setting is invalid.
            BackendError: settings differ between ranks.
    """
    comm = communicator(comm)

    def made() -> Gpu:
        mine = settings.found("cupy", way=way, wait_limit=wait_limit, debug=debug)
        transport, agreed = joined_alike(comm, mine)
        try:
            found = _found(transport, device, arrays)
            nccl = None
            if agreed["way"] == "nccl":
                nccl = opened(transport, found, machine_of(transport.comm))
            choice = _chosen(transport, found, agreed["way"])
        except BaseException as error:
            transport.give_up(error)
            raise
        options = {**agreed, "device": device, "arrays": arrays}
        return Gpu(transport, found, choice, options, nccl)

    return kept(comm, _KEY, made)


def launch(main: Callable[[Backend], Any], workers: int | None = None, **options: Any) -> list[Any]:
    """As `linop.backends.mpi.backend.launch`, with the options of `get`."""
    return launch_by(get, main, workers, options)


def _found(transport: Ranks, device: int | None, arrays: DeviceArrays | None) -> DeviceArrays:
    """The array module, with this rank's GPU as the current device; collective, since every rank
    needs one.

    Raises:
        The first error of any rank, on every rank.
    """
    transport.gather_all(None)  # a barrier with a time limit
    here = transport.comm.Split_type(MPI.COMM_TYPE_SHARED)
    number = here.rank
    here.Free()

    def chosen() -> DeviceArrays:
        found = arrays or cupy_arrays()
        _use(found.module.cuda, number, device)
        return found

    return OnTransport(transport).each(chosen, "cupy", "choose a device")


def _use(cuda: Any, local: int, number: int | None) -> None:
    """Set the current device of this thread: of a number, by default this rank's number on its
    machine modulo the number of devices.

    Raises:
        BackendError: there is no such device.
    """
    there = cuda.runtime.getDeviceCount()
    if number is not None and not 0 <= number < there:
        raise BackendError(f"device {number} wanted; there are {there}")
    cuda.Device(local % there if number is None else number).use()


def _chosen(transport: Ranks, arrays: DeviceArrays, wanted: str) -> Answer:
    """Decision to pass device memory to MPI, with its reason; collective, the same on all ranks.

    Raises:
        BackendError: "aware" is asked for, and the test transfer failed.
    """
    if wanted in ("staged", "nccl"):
        return Answer(False, "asked for")
    if wanted == "aware":
        answer = tried(transport, arrays)
        if not answer.yes:
            raise BackendError(f"way 'aware': {answer.why}; use way='staged'")
        return Answer(True, f"asked for, and {answer.why}")
    here = gpu_here(arrays.module.cuda, machine_of(transport.comm))
    if workers := sharing(transport.gather_all(here)):
        return Answer(False, f"workers {workers} share a GPU, where that is faster")
    answer = asked()
    silent = [worker for worker, yes in enumerate(transport.gather_all(answer.yes)) if not yes]
    if silent:
        return Answer(False, answer.why if not answer.yes else f"no support on workers {silent}")
    return tried(transport, arrays)


class Gpu(RankWorker):
    """One rank as a worker, with a GPU.

    Attributes:
        aware: whether device memory is passed to MPI, and the reason.

    Args:
        options: settings, as all ranks agreed on them, and the arguments of `get`.
        nccl: communicator for all messages of plans; None: they are MPI's.
    """

    def __init__(
        self,
        transport: Ranks,
        arrays: DeviceArrays,
        aware: Answer,
        options: dict[str, Any],
        nccl: Nccl | None = None,
    ) -> None:
        super().__init__(get, options, transport, arrays)
        self._device = arrays
        self._nccl = nccl
        self.aware = aware

    def board(self, doing: str) -> Board | None:
        self.transport.gather_all(None, doing)  # all ranks have arrived: what follows blocks
        machines = self.transport.gather_all(machine_of(self.transport.comm))
        return board_of(self, doing) if len(set(machines)) == 1 else None

    def prepare(self, plan: LoweredPlan) -> None:
        """Open NCCL's communicator anew if a failed call has closed it; collective."""
        if self._nccl is not None:
            self._nccl.mend()

    def leave(self) -> None:
        if self._nccl is not None:
            self._nccl.leave()
        super().leave()

    def program(
        self,
        plan: LoweredPlan,
        group: Sequence[int],
        tag: int,
        about: Callable[[], str],
        numbered: bool = True,
    ) -> Program:
        layout, calls, aware = self.layout(plan), self.calls(group, numbered), self.aware.yes
        how: Communication
        if self._nccl is not None:
            how = NcclMessages(layout, self.transport, tag, about, self._nccl, calls)
        else:
            how = DeviceMessages(layout, self.transport, tag, about, self._device, aware, calls)
        return Program(layout, how, calls)

    def way(self, program: Program | None = None) -> str:
        del program
        if self._nccl is not None:
            return f"{WAY}: NCCL {version(self._device.module.cuda)}, asked for"
        return f"{way(self.aware.yes)}: {self.aware.why}"


_KEY = new_key()
