"""The programs of all workers together, proven: they compute their operator, in every order in
which their operations may come.

`prove` executes the instructions that emitters get (`support.planning.exported`) on numbers modulo
a prime: arguments are drawn, local maps are unknown functions, so that programs which give the
results of `Stages` compute the operator, but for a chance of one in a thousand million. They are
executed in one order, which decides for all: each access is compared, by vector clocks, with those
of other workers, and two that could come in either order are an error; messages and signals have
one writer and one reader each. Memory of packets under way belongs to the transport. A wait ends
only if what it waits for must have come, a send only once its receive was posted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from linop.backends.engine.execution.instructions import Flag, Sign
from linop.normal_form.stages import Stages
from linop.planning.patterns import Kind
from support.planning.exported import (
    Alias,
    Base,
    Box,
    Clear,
    Complete,
    Each,
    Exported,
    Join,
    Map,
    Move,
    OfRun,
    Operation,
    Packet,
    Piece,
    Post,
    Room,
    Signal,
    Static,
    Sum,
    Until,
)
from support.planning.field import PRIME, applied, modulo, unknown

_NOTHING = -1
"""Value of memory that nobody has written."""
_PAGE = 1 << 12
_SLOTS = 3
"""Buffers of a large result, which are used in turn here."""


class Wrong(Exception):
    """The programs do not compute the operator, or not always."""


def require(condition: Any, what: str) -> None:
    if not condition:
        raise Wrong(what)


def prove(programs: Sequence[Exported], stages: Stages, seed: int = 0) -> None:
    """Prove that programs, one of each worker, compute an operator, call after call: in more calls
    than there are buffers in turn.

    Raises:
        Wrong: they do not.
    """
    runs = 2 + max([_SLOTS, *(many for program in programs for many in program.ready.values())])
    machine = _Machine(programs)
    require(set(stages.workers) <= set(machine.index), "a worker of the operator is not there")
    for program in programs:
        sides = (program.inputs, stages.domain), (program.outputs, stages.codomain)
        for known, space in sides:
            held = {region.name for region in space.on(program.worker)}
            require(known.keys() == held, "other arguments or results")
    rng = np.random.default_rng(seed)
    given, wanted = [], []
    for _ in range(runs):
        x = {r.name: rng.integers(0, PRIME, r.shape) for r in stages.domain.regions}
        given.append(x)
        wanted.append(applied(stages, x))
    machine.execute(given, wanted)


# Memory


class _Page:
    def __init__(self, workers: int) -> None:
        self.value = np.full(_PAGE, _NOTHING, np.int64)
        self.writer = np.zeros(_PAGE, np.int64)
        self.written = np.zeros(_PAGE, np.int64)
        self.read = np.zeros((workers, _PAGE), np.int64)
        self.leaving = np.zeros(_PAGE, np.int64)
        self.coming = np.zeros(_PAGE, np.int64)


Bytes = tuple[Room, np.ndarray]
"""Addresses of bytes, in an array of shape (elements, itemsize) or (bytes,)."""


class _Machine:
    def __init__(self, programs: Sequence[Exported]) -> None:
        self.index = {program.worker: k for k, program in enumerate(programs)}
        require(len(self.index) == len(programs), "two programs of one worker")
        self.programs = programs
        self.pages: dict[tuple[Room, int], _Page] = {}
        self.clocks = np.zeros((len(programs), len(programs)), np.int64)
        self.sent: dict[tuple[int, int], list[tuple[np.ndarray, np.ndarray]]] = defaultdict(list)
        self.posted: dict[tuple[int, int], int] = defaultdict(int)
        self.joined: dict[tuple[Any, int], dict[int, tuple[Join, np.ndarray, np.ndarray]]] = {}
        self.given: dict[tuple[Any, ...], list[tuple[Any, np.ndarray]]] = defaultdict(list)
        self.taken: dict[tuple[Any, ...], np.ndarray] = {}

    # Accesses

    def _paged(self, where: Bytes) -> Iterator[tuple[_Page, np.ndarray, np.ndarray]]:
        room, flat = where[0], where[1].reshape(-1)
        for number in np.unique(flat // _PAGE).tolist():
            mask = flat // _PAGE == number
            key = room, number
            if key not in self.pages:
                self.pages[key] = _Page(len(self.programs))
            yield self.pages[key], flat[mask] % _PAGE, mask

    def read(self, me: int, where: Bytes, garbage: bool = False) -> np.ndarray:
        """Values of bytes."""
        found = np.zeros(where[1].size, np.int64)
        clock = self.clocks[me]
        for page, at, mask in self._paged(where):
            require((page.written[at] <= clock[page.writer[at]]).all(), "read while written")
            require(not page.coming[at].any(), "read before the message is complete")
            page.read[me, at] = clock[me]
            found[mask] = page.value[at]
        require(garbage or (found != _NOTHING).all(), "what nobody has written is read")
        return found.reshape(where[1].shape)

    def write(self, me: int, where: Bytes, values: np.ndarray, by_transport: bool = False) -> None:
        flat, clock = np.broadcast_to(values, where[1].shape).reshape(-1), self.clocks[me]
        for page, at, mask in self._paged(where):
            require((page.written[at] <= clock[page.writer[at]]).all(), "written while written")
            require((page.read[:, at] <= clock[:, None]).all(), "written while read")
            require(not page.leaving[at].any(), "written while it is sent")
            require(by_transport or not page.coming[at].any(), "written while it is received")
            page.value[at] = flat[mask]
            page.writer[at], page.written[at] = me, clock[me]

    def busy(self, where: Bytes, incoming: bool, change: int) -> None:
        for page, at, _ in self._paged(where):
            if incoming and change > 0:
                require(not page.coming[at].any(), "two messages are received in one place")
                require(not page.leaving[at].any(), "received where something is sent from")
            np.add.at(page.coming if incoming else page.leaving, at, change)

    # Execution

    def execute(self, given: Sequence[Any], wanted: Sequence[Any]) -> None:
        left = {
            program.worker: _Run(self, program).steps(given, wanted) for program in self.programs
        }
        progress = True
        while left and progress:
            progress = False
            for worker, steps in list(left.items()):
                while (said := next(steps, "ended")) == "went on":
                    progress = True
                if said == "ended":
                    progress = True
                    del left[worker]
        require(not left, f"workers {sorted(left)} wait for each other, or in vain")
        for (source, target), packets in self.sent.items():
            require(
                len(packets) == self.posted[source, target], f"{source} to {target}: no receive"
            )


class _Run:
    """One worker."""

    def __init__(self, machine: _Machine, program: Exported) -> None:
        self.machine, self.program = machine, program
        self.me = machine.index[program.worker]
        self.run = 0
        self.of_run: dict[int, tuple[Room, np.ndarray, int]] = {}
        self.variables: dict[str, Any] = {}
        self.under_way: dict[int, Any] = {}
        self.joins: dict[Any, int] = defaultdict(int)

    @property
    def clock(self) -> np.ndarray:
        clock: np.ndarray = self.machine.clocks[self.me]
        return clock

    def steps(self, given: Sequence[Any], wanted: Sequence[Any]) -> Iterator[str]:
        program = self.program
        for self.run, (x, y) in enumerate(zip(given, wanted, strict=True), 1):
            self.of_run.clear()
            for name, base in program.inputs.items():
                self.set(base, x[name])
            yield from self.each(program.operations)
            require(not self.under_way, "a message that nobody waits for")
            for name, base in program.outputs.items():
                same = np.array_equal(self.get(base), y[name])
                require(same, f"another result: {name}, in run {self.run}")
            yield "went on"

    # Memory

    def places(self, base: Base) -> tuple[Room, np.ndarray, int]:
        """The room, the addresses of elements, and the bytes of each."""
        match base:
            case Static(rooms=rooms, places=places, itemsize=itemsize):
                k = self.run % len(rooms)
                return rooms[k], places[k], itemsize
            case OfRun(buffer=buffer, shape=shape):
                if buffer not in self.of_run:
                    size = self.program.dtype.itemsize
                    places = np.arange(int(np.prod(shape))).reshape(shape) * size
                    room = "run", self.program.worker, self.run, buffer
                    self.of_run[buffer] = room, places, size
                return self.of_run[buffer]
            case Piece(flat=flat, begin=begin, shape=shape):
                room, places, size = self.places(flat)
                count = int(np.prod(shape))
                require(0 <= begin and begin + count <= places.size, "a piece beyond its buffer")
                return room, places.reshape(-1)[begin : begin + count].reshape(shape), size
            case Box(base=inner, index=index):
                room, places, size = self.places(inner)
                known = self.variables[index] if isinstance(index, str) else index
                return room, places[known], size

    def bytes(self, base: Base) -> Bytes:
        room, places, size = self.places(base)
        return room, places[..., None] + np.arange(size)

    def get(self, base: Base) -> np.ndarray:
        return _elements(self.machine.read(self.me, self.bytes(base)))

    def set(self, base: Base, values: np.ndarray) -> None:
        self.clock[self.me] += 1
        where = self.bytes(base)
        require(where[1].shape[:-1] == values.shape, "shapes differ")
        self.machine.write(self.me, where, values[..., None])

    # Operations

    def each(self, operations: Sequence[Operation]) -> Iterator[str]:
        for one in operations:
            self.clock[self.me] += 1
            match one:
                case Each(names=names, values=values, body=body):
                    for each in values:
                        self.variables.update(zip(names, each, strict=True))
                        yield from self.each(body)
                case Complete(packets=packets):
                    for number in packets:
                        yield from self.complete(number)
                case Until(flags=flags):
                    for flag in flags:
                        yield from self.until(flag, one)
                case _:
                    self.do(one)
            yield "went on"

    def do(self, one: Operation) -> None:
        match one:
            case Clear(target=target):
                self.set(target, np.zeros(self.places(target)[1].shape, np.int64))
            case Move(target=target, source=source, coefficient=coefficient, adds=adds):
                value = self.get(source) * modulo(coefficient) % PRIME
                self.set(target, (self.get(target) + value) % PRIME if adds else value)
            case Sum(target=target, first=first, second=second):
                self.set(target, (self.get(first) + self.get(second)) % PRIME)
            case Map(number=number, sources=sources, results=results):
                of = [self.get(source) for source in sources]
                for k, result in enumerate(results):
                    shape = self.places(result)[1].shape
                    self.set(result, unknown(number, of, k, shape))
            case Alias(result=result, source=source, contiguous=contiguous):
                if contiguous:
                    self.of_run[result.buffer] = self.places(source)
                else:
                    self.set(result, self.get(source))
            case Post(packets=packets):
                for packet in packets:
                    self.post(packet)
            case Join():
                self.join(one)
            case Signal(flags=flags):
                for flag in flags:
                    self.signal(flag, one)
            case _:
                raise AssertionError(one)

    # Messages

    def packet(self, packet: Packet) -> Bytes:
        room, places = self.bytes(packet.where)
        flat = places.reshape(-1)
        require((np.diff(flat) == 1).all(), "a message that is not contiguous")
        return room, flat[packet.start : packet.stop]

    def post(self, packet: Packet) -> None:
        where, machine = self.packet(packet), self.machine
        if packet.incoming:  # from now on it may be written to
            machine.write(self.me, where, np.array(_NOTHING))
        require(packet.number not in self.under_way, "a message is begun twice")
        require(packet.peer in machine.index, f"a message for {packet.peer}, who is not there")
        machine.busy(where, packet.incoming, 1)
        if packet.incoming:
            pair = packet.peer, self.program.worker
            self.under_way[packet.number] = packet, where, pair, machine.posted[pair]
            machine.posted[pair] += 1
            return
        pair = self.program.worker, packet.peer
        self.under_way[packet.number] = packet, where, pair, len(machine.sent[pair])
        values = machine.read(self.me, where, garbage=True)
        machine.sent[pair].append((values, self.clock.copy()))

    def complete(self, number: int) -> Iterator[str]:
        require(number in self.under_way, "a wait for a message that was not begun")
        packet, where, key, turn = self.under_way[number]
        machine = self.machine
        if isinstance(packet, Join):
            yield from self.joined(packet, where, key, turn, number)
        elif packet.incoming:
            while len(machine.sent[key]) <= turn:
                yield "waits"
            values, clock = machine.sent[key][turn]
            require(values.shape == where[1].shape, f"{key}: a message of another size")
            self.arrive(where, values, [clock])
        else:
            while machine.posted[key] <= turn:
                yield "waits"
            self.left(where)
        del self.under_way[number]

    def left(self, where: Bytes) -> None:
        """It may have been read until now."""
        self.clock[self.me] += 1
        self.machine.busy(where, False, -1)
        self.machine.read(self.me, where, garbage=True)

    def arrive(self, where: Bytes, values: np.ndarray, clocks: Sequence[np.ndarray]) -> None:
        for clock in clocks:
            np.maximum(self.clock, clock, out=self.clock)
        self.clock[self.me] += 1
        self.machine.write(self.me, where, values, by_transport=True)
        self.machine.busy(where, True, -1)

    # Collectives

    def join(self, one: Join) -> None:
        group = one.found.group
        require(self.program.worker in group, "a collective of others")
        turn = self.joins[group]
        self.joins[group] += 1
        sends = self.packet(one.sends)
        values = self.machine.read(self.me, sends)
        key = group, turn
        members = self.machine.joined.setdefault(key, {})
        members[self.program.worker] = one, values, self.clock.copy()
        first = next(iter(members.values()))[0]
        require(one.found == first.found, "members of a group begin different collectives")
        size = len(values) // self.program.dtype.itemsize
        require(size in _brings(one, self.program.worker), "a contribution of another size")
        if one.found.kind in (Kind.BROADCAST, Kind.REDUCE):
            is_root = self.program.worker == one.found.root
            gets = is_root if one.found.kind is Kind.REDUCE else not is_root
            require((one.receives is not None) == gets, "who gets a result is not who wants it")
        for packet in (one.sends, one.receives):
            if packet is not None:
                where = self.packet(packet)
                require(packet.number not in self.under_way, "a collective is begun twice")
                if packet.incoming:
                    self.machine.write(self.me, where, np.array(_NOTHING))
                self.machine.busy(where, packet.incoming, 1)
                self.under_way[packet.number] = one, where, key, packet.incoming

    def joined(
        self, one: Join, where: Bytes, key: Any, incoming: bool, number: int
    ) -> Iterator[str]:
        members = self.machine.joined[key]
        while len(members) < len(key[0]):
            yield "waits"
        if not incoming:
            self.left(where)
            return
        itemsize, found = self.program.dtype.itemsize, one.found
        kind, group, mine = found.kind, found.group, found.group.index(self.program.worker)
        size = where[1].size // itemsize
        from_all = {w: values.reshape(-1, itemsize) for w, (_, values, _) in members.items()}
        clocks = [clock for *_, clock in members.values()]
        if kind is Kind.BROADCAST:
            values, clocks = from_all[found.root or 0], [members[found.root or 0][2]]
        elif kind in (Kind.REDUCE, Kind.ALL_REDUCE, Kind.REDUCE_SCATTER):
            parts = [part for w, part in from_all.items() if members[w][0].sends and len(part)]
            lengths = {len(part) for part in parts}
            require(len(lengths) == 1, "contributions of different sizes are summed")
            values = np.sum(parts, axis=0) % PRIME
            if kind is Kind.REDUCE_SCATTER:
                before = sum(found.count(w) for w in group[:mine])
                values = values[before : before + found.count(group[mine])]
        elif kind is Kind.ALL_GATHER:
            values = np.concatenate([from_all[w] for w in group])
        else:
            pieces = []
            for w in group:
                sent = members[w][0].sent
                at = group.index(w)
                require(one.received[at] == sent[mine], "received as another number than sent")
                begin = sum(sent[:mine])
                pieces.append(from_all[w][begin : begin + sent[mine]])
            values = np.concatenate(pieces)
        require(len(values) == size, "the result of a collective has another size")
        self.arrive(where, values.reshape(-1), clocks)

    # Signals

    def number(self, piece: str | None, ahead: int = 0) -> Any:
        return self.run + ahead if piece is None else (self.run, self.variables[piece])

    def signal(self, flag: Flag, one: Signal) -> None:
        require(flag.source == self.program.worker, "a signal of another worker")
        key = (*flag[:4], self.run % flag.turns) if flag.sign is Sign.DONE else flag[:4]
        said = self.machine.given[key]
        if flag.sign is Sign.DONE and said:
            read = self.machine.taken.get((key, said[-1][0]))
            require(
                read is not None and (read <= self.clock).all(), "a signal is lost: nobody read it"
            )
        number = self.number(one.piece, one.ahead)
        require(not said or said[-1][0] < number, "a signal that does not grow")
        said.append((number, self.clock.copy()))

    def until(self, flag: Flag, one: Until) -> Iterator[str]:
        require(flag.target == self.program.worker, "a wait for a signal to another worker")
        key = (*flag[:4], self.run % flag.turns) if flag.sign is Sign.DONE else flag[:4]
        wanted = self.number(one.piece)
        if flag.sign is Sign.READY and self.program.ready.get(flag.source, 0) >= wanted:
            return
        while True:
            enough = flag.sign is not Sign.DONE
            said = [
                c for n, c in self.machine.given[key] if n == wanted or (enough and n >= wanted)
            ]
            if said:
                break
            yield "waits"
        np.maximum(self.clock, said[0], out=self.clock)
        self.clock[self.me] += 1
        self.machine.taken[key, wanted] = np.where(
            np.arange(len(self.clock)) == self.me, self.clock, 0
        )


def _brings(one: Join, worker: int) -> tuple[int, ...]:
    """Numbers of elements that a member of a collective may contribute."""
    found = one.found
    match found.kind:
        case Kind.BROADCAST:
            return (found.counts[0],) if worker == found.root else (0,)
        case Kind.REDUCE:
            return (found.counts[0], 0) if worker == found.root else (found.counts[0],)
        case Kind.ALL_REDUCE:
            return (found.counts[0],)
        case Kind.ALL_GATHER:
            return (found.count(worker),)
        case Kind.REDUCE_SCATTER:
            return (sum(found.count(w) for w in found.group),)
    return (sum(one.sent),)


def _elements(found: np.ndarray) -> np.ndarray:
    """Values of elements of their bytes, on the last axis."""
    first = found[..., 0]
    require((found == first[..., None]).all(), "an element of which a part is another's")
    return first
