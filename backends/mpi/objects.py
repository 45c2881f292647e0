"""All-gathers of small objects over a communicator of MPI's, before there is a backend: in the
format of control messages, not pickled as mpi4py's own methods for objects do."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from mpi4py import MPI

from linop.backends.together.messages import decoded, encoded

Item = TypeVar("Item")


def gathered(comm: MPI.Intracomm, item: Item) -> list[Item]:
    """All ranks' items, by rank; collective, without a limit of time.

    Raises:
        ArgumentError: the item cannot be sent; on this rank.
    """
    mine = np.frombuffer(encoded(item), np.uint8)
    sizes = np.empty(comm.size, np.int64)
    comm.Allgather(np.array([mine.size], np.int64), sizes)
    everyones = np.empty(int(sizes.sum()), np.uint8)
    comm.Allgatherv(mine, [everyones, sizes.tolist()])
    ends = np.cumsum(sizes)
    pairs = zip(ends - sizes, ends, strict=True)
    return [decoded(everyones[begin:end].tobytes()) for begin, end in pairs]
