"""NCCL through CuPy: exchanges of bytes between the devices of all ranks.

NCCL has no tags: the messages between two ranks are matched by their order. Messages that must
proceed together are queued as one group. Their end is on the stream, not on the host, and a message
that its receiver never takes stops the stream for ever. So the host waits for an event, looks for
alarms meanwhile, and ends what never arrives: it aborts the communicator, which is opened anew when
all ranks compile a plan.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple, TypeVar

from linop.backends.device.device_arrays import DeviceArrays
from linop.backends.mpi.device.sharing import gpu_here, sharing
from linop.backends.mpi.transport import Ranks
from linop.backends.together.meeting import OnTransport
from linop.backends.together.transport import Who
from linop.errors import BackendError, MissingExtraError
from linop.spaces.scalars import Array

Result = TypeVar("Result")
Messages = Sequence[tuple[int, Array]]
"""Contiguous arrays on the device, each with the rank that it goes to or comes from; no two of
one rank."""
_OPENING = "cupy", "open NCCL"
"""Words for `Meeting.together`."""


class Queued(NamedTuple):
    """An exchange under way: its communicator, and the event of its end."""

    comm: Any
    event: Any


class Nccl:
    """This rank's communicator of NCCL, with all ranks.

    Args:
        transport: for control messages.
        arrays: array module of the current device.

    Attributes:
        turn: lock held from the agreement of ranks on an exchange until it is queued.
    """

    def __init__(self, transport: Ranks, arrays: DeviceArrays) -> None:
        self.turn = threading.Lock()
        self._ranks = transport
        self._arrays = arrays
        self._nccl = library(arrays.module.cuda)
        self._comm: Any = None
        self._idle: list[Any] = []
        """Communicators that no rank may use any more, and that nothing is queued on."""
        self._why = ""
        self._over: Callable[[], bool] = lambda: True
        self._met: set[tuple[int, bool]] = set()

    # The communicator

    def open(self) -> None:
        """Make the communicator; collective.

        Raises:
            BackendError: NCCL fails on a rank; on every rank. DeadlockError: the limit is reached.
        """
        ranks, nccl = self._ranks, self._nccl

        def begin() -> Any:
            return nccl.NcclCommunicator(ranks.workers, number, ranks.worker)

        number = self._alike(lambda: nccl.get_unique_id() if ranks.worker == 0 else None)[0]
        who = "all others to open NCCL"
        comms: list[Any] = []
        self._alike(lambda: comms.append(self._bounded(begin, lambda: who)))
        self._comm, self._met, self._over = comms[0], set(), lambda: True

    def mend(self) -> None:
        """Open the communicator anew if it was closed on any rank; collective."""
        if any(self._ranks.gather_all(self._comm is None, _OPENING[1])):
            self.close("others opened it anew")
            self._alike(self._abort_idle)
            self.open()

    def close(self, why: str) -> None:
        """End all exchanges of this rank; later ones raise. Peers that wait for them do so until
        they hear an alarm."""
        comm, self._comm = self._comm, None
        if comm is None:
            return
        self._why = why
        if self._over():  # peers may still read what this rank has sent
            self._idle.append(comm)
        else:
            comm.abort()

    def leave(self) -> None:
        """Free the communicator; collective."""
        if self._comm is not None:
            self._comm.destroy()
        self._abort_idle()

    def _abort_idle(self) -> None:
        while self._idle:
            self._idle.pop().abort()

    def _closed(self) -> BackendError:
        return BackendError(
            f"NCCL's communicator was closed, which ended the calls of all plans: {self._why}; "
            f"compile a plan on all workers, which opens it anew"
        )

    def _failed(self, error: Exception) -> BackendError:
        self.close(str(error))
        return BackendError(f"NCCL: {error}; NCCL_DEBUG=WARN lets it say more")

    def _alike(self, work: Callable[[], Result]) -> list[Result]:
        """Results of a function on all ranks; the first error of any, on every rank."""

        def done() -> tuple[None, Result]:
            try:
                return None, work()
            except self._nccl.NcclError as error:
                raise self._failed(error) from error

        return OnTransport(self._ranks).together(done, *_OPENING)[1]

    def _bounded(self, work: Callable[[], Result], who: Who) -> Result:
        """Result of a function that may block for ever, called in another thread."""
        results: list[Result] = []
        errors: list[BaseException] = []
        where = self._arrays.surroundings()

        def run() -> None:
            try:
                with where:
                    results.append(work())
            except BaseException as error:
                errors.append(error)

        threading.Thread(target=run, daemon=True, name="linop: NCCL").start()
        self._ranks.until(lambda: bool(results or errors), who)
        if errors:
            raise errors[0]
        return results[0]

    # Exchanges

    def exchange(self, sent: Messages, received: Messages, who: Who) -> Queued:
        """Queue messages on the current stream, as one group. Between two ranks, all of them queue
        the same messages in the same order."""
        comm = self._comm
        if comm is None:
            raise self._closed()

        def queue() -> Any:
            stream = self._arrays.streams.current.ptr
            self._nccl.groupStart()
            try:
                for peer, array in sent:
                    comm.send(array.data.ptr, array.nbytes, self._nccl.NCCL_UINT8, peer, stream)  # type: ignore[attr-defined]
                for peer, array in received:
                    comm.recv(array.data.ptr, array.nbytes, self._nccl.NCCL_UINT8, peer, stream)  # type: ignore[attr-defined]
            finally:
                self._nccl.groupEnd()
            return self._arrays.streams.mark()

        ways = {(peer, True) for peer, _ in sent} | {(peer, False) for peer, _ in received}
        self._over = lambda: False
        try:
            # The first messages of two ranks connect them, for which the host waits.
            event = queue() if ways <= self._met else self._bounded(queue, who)
        except self._nccl.NcclError as error:
            raise self._failed(error) from None
        self._met |= ways
        self._over = lambda: bool(event.done)
        return Queued(comm, event)

    def wait(self, queued: Queued, who: Who) -> None:
        """Wait until an exchange is over.

        Raises:
            LinopError: an alarm, a deadlock or the limit ends the wait; NCCL fails, or its
                communicator was closed.
        """

        def over() -> bool:
            done: bool = queued.event.done
            if self._comm is not queued.comm:  # aborted: the event is done, the messages are not
                raise self._closed()
            if not done:
                queued.comm.check_async_error()
            return done

        try:
            self._ranks.until(over, who)
        except self._nccl.NcclError as error:
            raise self._failed(error) from None


def opened(transport: Ranks, arrays: DeviceArrays, machine: int) -> Nccl:
    """NCCL's communicator of all ranks; collective.

    Args:
        machine: the lowest rank on this rank's machine.

    Raises:
        MissingExtraError: CuPy finds no NCCL. BackendError: two ranks share a GPU, or NCCL fails.
            All on every rank.
    """
    cuda = arrays.module.cuda

    def here() -> tuple[None, Any]:
        if why := missing(cuda):
            raise MissingExtraError(f"way 'nccl': {why}; without it: way='staged'")
        return None, gpu_here(cuda, machine)

    _, gpus = OnTransport(transport).together(here, *_OPENING)
    if workers := sharing(gpus):
        raise BackendError(
            f"way 'nccl': workers {workers} share the GPU {gpus[workers[0]][1]}, and NCCL takes "
            f"one rank for each; start fewer ranks, say which GPU (device=), or use way='staged'"
        )
    nccl = Nccl(transport, arrays)
    nccl.open()
    return nccl


def missing(cuda: Any) -> str:
    """Reason for which CuPy has no NCCL; empty if it has one."""
    if library(cuda).available:
        return ""
    why = "CuPy finds no NCCL: pip install 'linop-algebra[cupy]' brings nvidia-nccl-cu13"
    try:  # what CuPy did, and kept to itself
        import_module("cupy_backends.cuda.libs.nccl")
    except ImportError as error:
        why += f" ({error})"
    return why


def library(cuda: Any) -> Any:
    """NCCL's functions: CuPy's submodule, which is there once it was imported."""
    return getattr(cuda, "nccl", None) or import_module(f"{cuda.__name__}.nccl")


def version(cuda: Any) -> str:
    """NCCL's version as text."""
    number: int = library(cuda).get_version()
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
