"""Programs with one fault: mutants of what `support.planning.exported` gives, by kind of fault."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from linop.backends.engine.execution.instructions import Flag, Sign
from support.planning.exported import (
    Alias,
    Base,
    Box,
    Complete,
    Each,
    Exported,
    Join,
    Map,
    Move,
    Operation,
    Packet,
    Post,
    Signal,
    Static,
    Sum,
    Until,
)

Mutate = Callable[[Operation, int], Iterator[Operation]]
"""Faulty versions of one operation, of so many workers."""


def mutants(program: Exported, workers: int) -> Iterator[tuple[str, Exported]]:
    """All, each with its kind."""
    done = program.operations
    for k, one in enumerate(done):
        yield "left out", replace(program, operations=(*done[:k], *done[k + 1 :]))
        if k + 1 < len(done):
            swapped = *done[:k], done[k + 1], one, *done[k + 2 :]
            yield "in another order", replace(program, operations=swapped)
        if isinstance(one, Complete | Until):
            early, late = (one, *done[:k], *done[k + 1 :]), (*done[:k], *done[k + 1 :], one)
            yield "waits at the begin", replace(program, operations=early)
            yield "waits at the end", replace(program, operations=late)
        for kind, mutate in KINDS.items():
            for other_one in mutate(one, workers):
                yield kind, replace(program, operations=(*done[:k], other_one, *done[k + 1 :]))


def shifted(base: Base) -> Iterator[Base]:
    """Memory beside that of a view."""
    match base:
        case Static(places=places, itemsize=itemsize):
            yield replace(base, places=tuple(place + itemsize for place in places))
        case Box(base=inner, index=tuple(index)):
            for axis, part in enumerate(index):
                if isinstance(part, slice) and part.start:
                    moved = slice(part.start - 1, part.stop - 1)
                    yield Box(inner, (*index[:axis], moved, *index[axis + 1 :]))


def is_number(packet: Packet) -> bool:
    """True for a message that may be the number of a call, which is no part of a proof."""
    return isinstance(packet.where, Static) and packet.where.places[0].size == 1


def elsewhere(one: Operation, workers: int) -> Iterator[Operation]:
    del workers
    match one:
        case Move(target=target, source=source):
            yield from (replace(one, target=other) for other in shifted(target))
            yield from (replace(one, source=other) for other in shifted(source))
        case Sum(target=target, first=first, second=second):
            yield from (replace(one, target=other) for other in shifted(target))
            yield from (replace(one, first=other) for other in shifted(first))
            yield from (replace(one, second=other) for other in shifted(second))
        case Map(sources=(source, *rest)):
            yield from (replace(one, sources=(other, *rest)) for other in shifted(source))
        case Alias(source=source):
            yield from (replace(one, source=other) for other in shifted(source))
        case Post(packets=(packet, *rest)) if not is_number(packet):
            for other in shifted(packet.where):
                yield Post((replace(packet, where=other), *rest))
        case Join(receives=Packet() as packet):
            yield from (
                replace(one, receives=replace(packet, where=other))
                for other in shifted(packet.where)
            )


def another_road(one: Operation, workers: int) -> Iterator[Operation]:
    """Writes to another worker's memory go to somebody else's."""
    match one:
        case Move(target=Static(rooms=rooms) as target):
            for k in range(workers):
                other = tuple((r[0], k, *r[2:]) if r[0] == "window" else r for r in rooms)
                if other != rooms:
                    yield replace(one, target=replace(target, rooms=other))


def another_peer(one: Operation, workers: int) -> Iterator[Operation]:
    if isinstance(one, Post):
        packet, *rest = one.packets
        for k in range(workers):
            if k != packet.peer:
                yield Post((replace(packet, peer=k), *rest))


def another_size(one: Operation, workers: int) -> Iterator[Operation]:
    del workers
    if isinstance(one, Post):
        packet, *rest = one.packets
        yield Post((replace(packet, start=(packet.start or 0) + 1), *rest))


def another_number(one: Operation, workers: int) -> Iterator[Operation]:
    del workers
    if isinstance(one, Move):
        yield replace(one, coefficient=one.coefficient + one.coefficient)
        yield replace(one, adds=not one.adds)


def another_map(one: Operation, workers: int) -> Iterator[Operation]:
    del workers
    if isinstance(one, Map):
        yield replace(one, number=one.number + 1)


def another_collective(one: Operation, workers: int) -> Iterator[Operation]:
    del workers
    if isinstance(one, Join) and one.found.root is not None:
        others = [w for w in one.found.group if w != one.found.root]
        yield replace(one, found=replace(one.found, root=others[0]))


def another_signal(one: Operation, workers: int) -> Iterator[Operation]:
    match one:
        case Signal(flags=(flag, *rest)) | Until(flags=(flag, *rest)):
            for other in _others(flag, workers):
                yield replace(one, flags=(other, *rest))
    if isinstance(one, Signal) and one.flags and one.flags[0].sign is Sign.READY:
        yield replace(one, ahead=one.ahead + 1)


def _others(flag: Flag, workers: int) -> Iterator[Flag]:
    yield flag._replace(stage=flag.stage + 2)
    yield from (flag._replace(sign=sign) for sign in Sign if sign is not flag.sign)
    yield from (flag._replace(target=k) for k in range(workers) if k != flag.target)


def pieces(one: Operation, workers: int) -> Iterator[Operation]:
    """Faults in what is done for each piece of a message."""
    if not isinstance(one, Each):
        return
    for k, inner in enumerate(one.body):
        yield replace(one, body=(*one.body[:k], *one.body[k + 1 :]))
        for mutate in (another_road, another_number, another_signal):
            for other in mutate(inner, workers):
                yield replace(one, body=(*one.body[:k], other, *one.body[k + 1 :]))
    yield replace(one, body=tuple(reversed(one.body)))
    yield replace(one, values=one.values[:-1])


FATAL = (
    "elsewhere",
    "another road",
    "another peer",
    "another size",
    "another number",
    "another map",
    "another collective",
)
"""Kinds that change what is computed, or who gets it. Some of the others change nothing: of two
waits one may be enough, since workers wait for each other elsewhere."""
KINDS: dict[str, Mutate] = {
    "elsewhere": elsewhere,
    "another road": another_road,
    "another peer": another_peer,
    "another size": another_size,
    "another number": another_number,
    "another map": another_map,
    "another collective": another_collective,
    "another signal": another_signal,
    "pieces": pieces,
}
