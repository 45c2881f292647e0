"""A simulated NCCL: the names of `cupy.cuda.nccl` that linop uses, on the simulated device.

What it is strict about: messages between two ranks have no tags, and are matched in the order of
their queueing; a group proceeds together, after all groups queued before; it ends when each of its
messages has been taken, and not before; until then it stops its stream. The first messages of two
ranks connect them, and the host waits for both. After `abort` a group ends with rubbish in place of
its messages, on that rank alone: its peers are told nothing.

Messages are files in a folder, whose name is the communicator's unique id.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import shutil
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

available = True
NCCL_UINT8 = 1
POISON = 0xA5
PATIENCE = 60.0
"""Seconds after which the simulation gives up: a test that hangs fails."""
_GROUP = threading.local()


class NcclError(RuntimeError):
    pass


def get_version() -> int:
    return 22707


def get_unique_id() -> bytes:
    folder = tempfile.mkdtemp(prefix="linop-nccl-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder.encode().ljust(128, b"\0")


def groupStart() -> None:
    _GROUP.depth = _GROUP.__dict__.get("depth", 0) + 1
    _GROUP.__dict__.setdefault("queued", [])


def groupEnd() -> None:
    _GROUP.depth -= 1
    if _GROUP.depth == 0:
        queued, _GROUP.queued = _GROUP.queued, []
        for comm in {id(one[0]): one[0] for one in queued}.values():
            comm.launch([one[1:] for one in queued if one[0] is comm])


class NcclCommunicator:
    fault = ""
    """An error on this rank: nothing proceeds, and it is found when it is asked for."""

    def __init__(self, ndev: int, commId: Any, rank: int) -> None:
        from support.device.simulated import Device

        self._folder = Path(bytes(commId).rstrip(b"\0").decode())
        self._rank = rank
        self._here = self._said(f"here-{rank}", Device().pci_bus_id.encode())
        self.aborted = False
        self._last: Group | None = None
        self._count: Counter[tuple[int, int]] = Counter()
        self._met: set[tuple[int, int]] = set()
        others = [self._folder / f"here-{other}" for other in range(ndev)]
        self._until(lambda: all(other.exists() for other in others))
        if len({other.read_bytes() for other in others}) < ndev:
            raise NcclError("NCCL_ERROR_INVALID_USAGE: duplicate GPU detected")

    def _said(self, name: str, data: bytes) -> Path:
        """A file that appears as a whole."""
        path, new = self._folder / name, self._folder / f"new-{name}"
        new.write_bytes(data)
        return new.rename(path)

    def _until(self, done: Any) -> None:
        begun = time.monotonic()
        while not done():
            if self.__dict__.get("aborted"):
                raise NcclError("NCCL_ERROR_INTERNAL_ERROR: aborted")
            assert time.monotonic() - begun < PATIENCE, "NCCL hangs"
            time.sleep(1e-4)

    def send(self, ptr: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._queue(self._rank, peer, ptr, count, datatype, stream)

    def recv(self, ptr: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._queue(peer, self._rank, ptr, count, datatype, stream)

    def _queue(
        self, source: int, target: int, ptr: int, count: int, datatype: int, stream: int
    ) -> None:
        assert datatype == NCCL_UINT8 and count > 0 and source != target
        groupStart()
        _GROUP.queued.append((self, source, target, ptr, count, stream))
        groupEnd()

    def launch(self, messages: list[tuple[int, int, int, int, int]]) -> None:
        from support.device.simulated_streams import STREAMS

        if self.aborted:
            raise NcclError("NCCL_ERROR_INVALID_USAGE: this communicator was aborted")
        assert len({(source, target) for source, target, *_ in messages}) == len(messages)
        found = []
        for source, target, ptr, count, _ in messages:
            self._count[source, target] += 1
            memory = np.ctypeslib.as_array((ctypes.c_uint8 * count).from_address(ptr))
            name = f"message-{source}-{target}-{self._count[source, target]}"
            found.append((self._folder / name, memory, source == self._rank))
        new = {(source, target) for source, target, *_ in messages} - self._met
        for source, target in new:
            self._said(f"met-{source}-{target}-by-{self._rank}", b"")
        for source, target in new:
            peer = source + target - self._rank
            other = self._folder / f"met-{source}-{target}-by-{peer}"
            self._until(other.exists)
        self._met |= new
        (stream,) = {stream for *_, stream in messages}
        self._last = Group(self, found, self._last)
        STREAMS[stream].exchange(self._last.proceed)

    def check_async_error(self) -> None:
        if NcclCommunicator.fault:
            raise NcclError(f"NCCL_ERROR_SYSTEM_ERROR: {NcclCommunicator.fault}")

    def abort(self) -> None:
        self.aborted = True
        self.destroy()

    def destroy(self) -> None:
        self._here.unlink(missing_ok=True)
        with suppress(FileNotFoundError):  # another rank is the last one too, and was quicker
            if not any(name.startswith("here-") for name in os.listdir(self._folder)):
                shutil.rmtree(self._folder, ignore_errors=True)


class Group:
    """Messages that proceed together.

    Args:
        messages: for each its file, its memory, and whether this rank sends it.
        before: the group queued before.
    """

    def __init__(
        self,
        comm: NcclCommunicator,
        messages: list[tuple[Path, np.ndarray, bool]],
        before: Group | None,
    ) -> None:
        self._comm, self._messages, self._before = comm, messages, before
        self._begun = self.over = False

    def proceed(self) -> bool:
        """True if the group is over; if not, it was tried to proceed."""
        if self._comm.aborted:
            for _, memory, sends in self._messages:
                if not sends:
                    memory.fill(POISON)
            self.over = True
        elif (
            not self.over
            and not self._comm.fault
            and (self._before is None or self._before.proceed())
        ):
            if not self._begun:
                for path, memory, sends in self._messages:
                    if sends:
                        self._comm._said(path.name, memory.tobytes())
            self._begun, self._before = True, None
            self._messages = [one for one in self._messages if not self._taken(*one)]
            self.over = not self._messages
        return self.over

    def _taken(self, path: Path, memory: np.ndarray, sends: bool) -> bool:
        if sends:
            return not path.exists()
        if not path.exists():
            return False
        data = path.read_bytes()
        assert len(data) == memory.size, "messages of different sizes were matched"
        memory[:] = np.frombuffer(data, np.uint8)
        path.unlink()
        return True
