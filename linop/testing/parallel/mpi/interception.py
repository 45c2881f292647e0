"""Calls of mpi4py, seen as they are made.

The communicators of mpi4py are objects of C, whose methods cannot be replaced. So, before a program
is loaded, ``MPI.COMM_WORLD`` is replaced by an object of a subclass with the same handle, whose
methods tell a listener and then call MPI. Communicators that it makes are of such classes, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI

from linop.testing.parallel.mpi.buffers import Area, UnreadError, area, areas, is_in_place


@dataclass
class Event:
    """A collective or a message, in the words of `records.Collective`.

    Attributes:
        given, made: the elements that this rank contributes and gets: one `Area`, or one for each
            rank where a rank's parts differ.
    """

    name: str
    ranks: tuple[int, ...]
    reduction: str
    peer: int
    given: list[Area]
    made: list[Area]
    tag: int = 0

    @property
    def dtype(self) -> str:
        return next((one.memory.dtype.name for one in (*self.given, *self.made)), "float64")

    @property
    def splits(self) -> tuple[list[int], list[int]] | None:
        if self.name != "all_to_all":
            return None
        return [len(one.positions) for one in self.given], [len(o.positions) for o in self.made]


Listener = Callable[[Event], None]
_LISTENERS: list[Listener] = []
_DIRECTION = 2**20
"""The tag of messages to the first neighbour."""
_PLAIN = MPI.COMM_WORLD
"""The communicator of all ranks, unlistened."""
_REDUCTIONS = (
    (MPI.SUM, "sum"),
    (MPI.MAX, "maximum"),
    (MPI.MIN, "minimum"),
    (MPI.PROD, "product"),
)


@contextmanager
def listened(listener: Listener) -> Iterator[None]:
    """Context in which a listener hears of calls, before they are made."""
    _LISTENERS.append(listener)
    try:
        yield
    finally:
        _LISTENERS.remove(listener)


def plain_world() -> Any:
    """The communicator of all ranks, whose calls nobody hears of."""
    return _PLAIN


def install() -> Any:
    """Replace ``MPI.COMM_WORLD``, once; returns the new one."""
    if not isinstance(MPI.COMM_WORLD, _Calls):
        setattr(MPI, "COMM_WORLD", Intracomm(_PLAIN))  # noqa: B010 (final, for type checkers)
    return MPI.COMM_WORLD


class _Calls:
    """Methods of communicators that tell the listeners. Mixed into classes of mpi4py."""

    @property
    def _ranks(self) -> tuple[int, ...]:
        """The global ranks, in the order of the communicator."""
        comm: Any = self
        group, everyone = comm.Get_group(), _PLAIN.Get_group()
        found = MPI.Group.Translate_ranks(group, None, everyone)
        group.Free()
        everyone.Free()
        return tuple(int(r) for r in found)

    def _tell(self, name: str, make: Callable[[], tuple[Any, Any]], **about: Any) -> None:
        """Tell the listeners of a call.

        Args:
            make: returns the areas that are given and made.
            about: ``op``, ``root`` (in the communicator), ``tag``.
        """
        if not _LISTENERS:
            return
        with suppress(UnreadError):
            given, made = make()
            ranks = self._ranks
            root = about.get("root")
            peer = -1 if root is None or root < 0 else ranks[root]
            op = about.get("op")
            names = [name for known, name in _REDUCTIONS if op is not None and known == op]
            reduction = "" if op is None else (*names, "other")[0]
            event = Event(name, ranks, reduction, peer, given, made, about.get("tag", 0))
            for one in list(_LISTENERS):
                one(event)

    @property
    def _size(self) -> int:
        comm: Any = self
        return int(comm.Get_size())

    @property
    def _rank(self) -> int:
        comm: Any = self
        return int(comm.Get_rank())

    # How the parts of each call are read

    def _allreduce(self, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM) -> None:
        def read() -> Any:
            made = area(recvbuf)
            return [made if is_in_place(sendbuf) else area(sendbuf)], [made]

        self._tell("all_reduce", read, op=op)

    def _scan(self, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM) -> None:
        def read() -> Any:
            made = area(recvbuf)
            return [made if is_in_place(sendbuf) else area(sendbuf)], [made]

        self._tell("scan", read, op=op)

    def _exscan(self, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM) -> None:
        def read() -> Any:
            made = area(recvbuf)
            return [made if is_in_place(sendbuf) else area(sendbuf)], [made] if self._rank else []

        self._tell("exclusive_scan", read, op=op)

    def _reduce(self, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM, root: int = 0) -> None:
        def read() -> Any:
            made = [area(recvbuf)] if self._rank == root else []
            return made if is_in_place(sendbuf) else [area(sendbuf)], made

        self._tell("reduce", read, op=op, root=root)

    def _bcast(self, buf: Any, root: int = 0) -> None:
        def read() -> Any:
            one = area(buf)
            return [one] if self._rank == root else [], [one]

        self._tell("broadcast", read, root=root)

    def _reduce_scatter_block(self, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM) -> None:
        def read() -> Any:
            if is_in_place(sendbuf):
                given = areas(recvbuf, self._size)
                return given, [given[0]]
            return areas(sendbuf, self._size), [area(recvbuf)]

        self._tell("reduce_scatter", read, op=op)

    def _reduce_scatter(
        self, sendbuf: Any, recvbuf: Any, recvcounts: Any = None, op: Any = MPI.SUM
    ) -> None:
        def read() -> Any:
            whole = area(recvbuf if is_in_place(sendbuf) else sendbuf)
            if recvcounts is None and not is_in_place(sendbuf):
                mine = len(area(recvbuf).positions)
                counts = _PLAIN_CALLS.allgather(self, mine)
            elif recvcounts is None:
                counts = [len(one.positions) for one in areas(recvbuf, self._size)]
            else:
                counts = [int(one) for one in recvcounts]
            given = whole.chunks(counts)
            if is_in_place(sendbuf):
                return given, [whole.part(0, counts[self._rank])]
            return given, [area(recvbuf).part(0, counts[self._rank])]

        self._tell("reduce_scatter", read, op=op)

    def _allgather(self, sendbuf: Any, recvbuf: Any) -> None:
        def read() -> Any:
            made = areas(recvbuf, self._size)
            return [made[self._rank] if is_in_place(sendbuf) else area(sendbuf)], made

        self._tell("all_gather", read)

    def _gather(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        def read() -> Any:
            made = areas(recvbuf, self._size) if self._rank == root else []
            return [made[self._rank] if is_in_place(sendbuf) else area(sendbuf)], made

        self._tell("gather", read, root=root)

    def _scatter(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        def read() -> Any:
            given = areas(sendbuf, self._size) if self._rank == root else []
            return given, [given[self._rank] if is_in_place(recvbuf) else area(recvbuf)]

        self._tell("scatter", read, root=root)

    def _alltoall(self, sendbuf: Any, recvbuf: Any) -> None:
        def read() -> Any:
            made = areas(recvbuf, self._size)
            return made if is_in_place(sendbuf) else areas(sendbuf, self._size), made

        self._tell("all_to_all", read)

    def _send(self, buf: Any, dest: int, tag: int = 0) -> None:
        if dest != MPI.PROC_NULL:
            self._tell("send", lambda: ([area(buf)], []), root=dest, tag=tag)

    def _recv(self, buf: Any, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG) -> None:
        if source != MPI.PROC_NULL:
            self._tell("receive", lambda: ([], [area(buf)]), root=source, tag=tag)

    def _unread(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs
        self._tell("unread", lambda: ([], []))

    def Recv(
        self,
        buf: Any,
        source: int = MPI.ANY_SOURCE,
        tag: int = MPI.ANY_TAG,
        status: Any = None,
    ) -> None:
        """From any source: it is known afterwards from which."""
        parent: Any = super()
        known = status if status is not None else MPI.Status()
        if MPI.ANY_SOURCE not in (source,) and tag != MPI.ANY_TAG:
            self._recv(buf, source, tag)
            parent.Recv(buf, source, tag, status)
            return
        parent.Recv(buf, source, tag, known)
        self._recv(buf, known.Get_source() if source == MPI.ANY_SOURCE else source, known.Get_tag())

    def Sendrecv(
        self,
        sendbuf: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: Any = None,
        source: int = MPI.ANY_SOURCE,
        recvtag: int = MPI.ANY_TAG,
        status: Any = None,
    ) -> None:
        parent: Any = super()
        self._send(sendbuf, dest, sendtag)
        known = status if status is not None else MPI.Status()
        if source != MPI.ANY_SOURCE and recvtag != MPI.ANY_TAG:
            self._recv(recvbuf, source, recvtag)
            parent.Sendrecv(sendbuf, dest, sendtag, recvbuf, source, recvtag, status)
            return
        parent.Sendrecv(sendbuf, dest, sendtag, recvbuf, source, recvtag, known)
        if source != MPI.PROC_NULL:
            self._recv(recvbuf, known.Get_source(), known.Get_tag())

    def Sendrecv_replace(
        self,
        buf: Any,
        dest: int,
        sendtag: int = 0,
        source: int = MPI.ANY_SOURCE,
        recvtag: int = MPI.ANY_TAG,
        status: Any = None,
    ) -> None:
        parent: Any = super()
        self._send(buf, dest, sendtag)
        known = status if status is not None else MPI.Status()
        parent.Sendrecv_replace(buf, dest, sendtag, source, recvtag, known)
        if source != MPI.PROC_NULL:
            self._recv(buf, known.Get_source(), known.Get_tag())

    # Calls of objects, of which arrays are looked at

    def allreduce(self, sendobj: Any, op: Any = MPI.SUM) -> Any:
        parent: Any = super()
        result = parent.allreduce(sendobj, op)
        if _is_array(sendobj) and _is_array(result):
            self._tell("all_reduce", lambda: ([area(sendobj)], [area(result)]), op=op)
        return result

    def bcast(self, obj: Any, root: int = 0) -> Any:
        parent: Any = super()
        result = parent.bcast(obj, root)
        if _is_array(result):
            given = [obj] if self._rank == root else []
            self._tell("broadcast", lambda: ([area(o) for o in given], [area(result)]), root=root)
        return result

    def allgather(self, sendobj: Any) -> Any:
        parent: Any = super()
        result = parent.allgather(sendobj)
        if all(_is_array(one) for one in (sendobj, *result)):
            self._tell("all_gather", lambda: ([area(sendobj)], [area(one) for one in result]))
        return result

    def alltoall(self, sendobj: Any) -> Any:
        parent: Any = super()
        given = list(sendobj)
        result = parent.alltoall(given)
        if all(_is_array(one) for one in (*given, *result)):
            self._tell(
                "all_to_all", lambda: ([area(one) for one in given], [area(one) for one in result])
            )
        return result

    def send(self, obj: Any, dest: int, tag: int = 0) -> None:
        parent: Any = super()
        if _is_array(obj):
            self._send(np.ascontiguousarray(obj), dest, tag)
        parent.send(obj, dest, tag)

    def recv(self, buf: Any = None, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG,
             status: Any = None) -> Any:  # fmt: skip
        parent: Any = super()
        known = status if status is not None else MPI.Status()
        result = parent.recv(buf, source, tag, known)
        if _is_array(result) and source != MPI.PROC_NULL:
            self._recv(result, known.Get_source(), known.Get_tag())
        return result


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind in "fc" and value.flags.c_contiguous


_READERS = {
    "Allreduce": "_allreduce",
    "Scan": "_scan",
    "Exscan": "_exscan",
    "Reduce": "_reduce",
    "Bcast": "_bcast",
    "Reduce_scatter_block": "_reduce_scatter_block",
    "Reduce_scatter": "_reduce_scatter",
    "Allgather": "_allgather",
    "Allgatherv": "_allgather",
    "Gather": "_gather",
    "Gatherv": "_gather",
    "Scatter": "_scatter",
    "Scatterv": "_scatter",
    "Alltoall": "_alltoall",
    "Alltoallv": "_alltoall",
    "Send": "_send",
    "Ssend": "_send",
    "Bsend": "_send",
    "Rsend": "_send",
}
_READERS |= {f"I{name[0].lower()}{name[1:]}": reader for name, reader in _READERS.items()}
_READERS["Irecv"] = "_recv"
_UNREAD = (
    "Alltoallw", "Ialltoallw", "Neighbor_alltoallw", "Ineighbor_alltoallw", "Send_init",
    "Recv_init", "Allreduce_init", "Bcast_init", "Isendrecv", "Isendrecv_replace", "Mprobe",
    "Improbe",
)  # fmt: skip
"""Methods whose buffers are not read."""
_MAKERS = (
    "Split", "Split_type", "Dup", "Dup_with_info", "Create", "Create_group", "Create_cart", "Sub",
    "Clone",
)  # fmt: skip
"""Methods that return communicators."""


class _Plain:
    """Calls of ours, which no listener hears of."""

    @staticmethod
    def allgather(comm: Any, item: Any) -> Any:
        kind = MPI.Cartcomm if isinstance(comm, MPI.Cartcomm) else MPI.Intracomm
        return kind.allgather(comm, item)


_PLAIN_CALLS = _Plain()


def _telling(name: str, reader: str) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        getattr(self, reader)(*args, **kwargs)
        return getattr(super(self._mixed, self), name)(*args, **kwargs)

    method.__name__ = name
    return method


def _making(name: str) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return wrapped(getattr(super(self._mixed, self), name)(*args, **kwargs))

    method.__name__ = name
    return method


for _name, _reader in _READERS.items():
    setattr(_Calls, _name, _telling(_name, _reader))
for _name in _UNREAD:
    setattr(_Calls, _name, _telling(_name, "_unread"))
for _name in _MAKERS:
    setattr(_Calls, _name, _making(_name))


class Intracomm(_Calls, MPI.Intracomm):
    """A communicator that tells the listeners of its calls."""

    _mixed = _Calls


class Cartcomm(_Calls, MPI.Cartcomm):
    """A Cartesian communicator that tells the listeners of its calls, those to neighbours as
    messages."""

    _mixed = _Calls

    def _to_neighbours(self, sendbuf: Any, recvbuf: Any, whole: bool) -> None:
        """A message in a direction arrives from the opposite one: tags say which."""
        neighbours = [r for d in range(self.Get_dim()) for r in self.Shift(d, 1)]
        count = len(neighbours)
        for k, other in enumerate(neighbours):
            if other != MPI.PROC_NULL:

                def given(k: int = k) -> Any:
                    return [area(sendbuf) if whole else areas(sendbuf, count)[k]], []

                self._tell("send", given, root=other, tag=_DIRECTION + k)
        for k, other in enumerate(neighbours):
            if other != MPI.PROC_NULL:

                def made(k: int = k) -> Any:
                    return [], [areas(recvbuf, count)[k]]

                self._tell("receive", made, root=other, tag=_DIRECTION + (k ^ 1))

    def _neighbor_alltoall(self, sendbuf: Any, recvbuf: Any) -> None:
        self._to_neighbours(sendbuf, recvbuf, False)

    def _neighbor_allgather(self, sendbuf: Any, recvbuf: Any) -> None:
        self._to_neighbours(sendbuf, recvbuf, True)


for _name in ("alltoall", "alltoallv", "allgather", "allgatherv"):
    for _kind in (f"Neighbor_{_name}", f"Ineighbor_{_name}"):
        setattr(Cartcomm, _kind, _telling(_kind, f"_neighbor_{_name.removesuffix('v')}"))


def wrapped(comm: Any) -> Any:
    """A communicator with the same handle that tells the listeners."""
    if isinstance(comm, _Calls) or comm == MPI.COMM_NULL:
        return comm
    if isinstance(comm, MPI.Cartcomm):
        return Cartcomm(comm)
    return Intracomm(comm) if isinstance(comm, MPI.Intracomm) else comm
