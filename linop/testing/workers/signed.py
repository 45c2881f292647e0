"""Messages between the ranks of ``mpiexec -n N pytest``: pickled, since tests' arguments may be of
any class, and signed with a key that the ranks have of each other, so that nobody else's is
unpickled.
"""

from __future__ import annotations

import hmac
import pickle
import secrets
from typing import Any

import numpy as np

from linop.errors import BackendError

_KEY = _CODE = 32
"""Bytes of the key, and of a message's code."""


class SignedMessages:
    """Messages over a communicator. Collective.

    Args:
        comm: of all ranks, used by nothing else.
    """

    def __init__(self, comm: Any) -> None:
        key = np.frombuffer(secrets.token_bytes(_KEY), np.uint8).copy()
        comm.Bcast(key)
        self._comm = comm
        self._key = key.tobytes()
        self._sent: dict[int, int] = {}
        self._received: dict[int, int] = {}

    def send(self, item: Any, rank: int, tag: int) -> None:
        number = self._sent[rank] = self._sent.get(rank, 0) + 1
        data = pickle.dumps(item)
        message = self._code(self._comm.rank, rank, number, data) + data
        self._comm.Send(np.frombuffer(message, np.uint8), rank, tag)

    def recv(self, source: int, tag: int) -> Any:
        """The next message of a rank.

        Raises:
            BackendError: that rank has not sent it.
        """
        from mpi4py import MPI

        status = MPI.Status()
        self._comm.Probe(source, tag, status)
        message = np.empty(status.Get_count(MPI.BYTE), np.uint8)
        self._comm.Recv(message, source, tag)
        code, data = message[:_CODE].tobytes(), message[_CODE:].tobytes()
        number = self._received[source] = self._received.get(source, 0) + 1
        if not hmac.compare_digest(code, self._code(source, self._comm.rank, number, data)):
            raise BackendError(f"a message of rank {source} for tests is not that rank's")
        return pickle.loads(data)

    def _code(self, source: int, target: int, number: int, data: bytes) -> bytes:
        head = b"%d %d %d " % (source, target, number)
        return hmac.digest(self._key, head + data, "sha256")
