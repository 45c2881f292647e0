"""Faults between stages of a pipeline: tensors that messages carry from rank to rank outside of
functions with a backward of their own, and gradients that other messages have to bring back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from linop.testing.parallel.faults.context import Context, scaled
from linop.testing.parallel.faults.ways import Way
from linop.testing.parallel.faults.words import detail, factor_text, module_of
from linop.testing.parallel.findings import Finding, Place
from linop.testing.parallel.recording.records import Call, Collective
from linop.testing.parallel.twins.locations import Location
from linop.testing.parallel.twins.parameters import Compared
from linop.testing.parallel.twins.relations import Kind, Relation


@dataclass(frozen=True)
class Passed:
    """A tensor that a message carries.

    Attributes:
        rank, here: where it comes from.
        peer: the rank that gets it.
        sent: the message, or the broadcast.
        there: the number of the tensor on the rank that gets it; None if it is not found.
    """

    rank: int
    peer: int
    here: Location
    sent: Collective
    there: int | None


def between_stages(
    context: Context, one: Compared, way: Way, here: Location, final: Relation
) -> Finding | None:
    """The fault of a gradient that is wrong since messages of gradients are, between the rank of a
    way and other ones; None if no message carries the tensor.

    Args:
        here: the last tensor of the way whose gradient is wrong.
    """
    rank = way.rank
    for _ in context.ranks:  # stages that the wrong gradient has passed
        passed = list(_messages(context, rank, here))
        if not passed:
            return None
        if lost := [each for each in passed if _gradient(context, each) is None]:
            return _not_sent_back(context, one, lost[0], final)
        for each in passed:
            further = _further(context, each, final)
            if further is not None:
                here, rank = further, each.peer
                break
        else:
            unlike = [each for each in passed if not _is_sent_back(context, each)]
            return _changed(context, one, (unlike or passed)[0], passed, final)
    return None


def _further(context: Context, passed: Passed, final: Relation) -> Location | None:
    """The last tensor with a wrong gradient on the way behind a message, if it has one."""
    assert passed.there is not None
    way = Way(context, passed.peer, [passed.there])
    at = context.locations.at.get((passed.peer, passed.there))
    if at is not None and at.gradient is not None and not _alike(passed.here.gradient, at.gradient):
        if at.gradient.kind is Kind.EQUAL:
            return None
    turn = way.turn(final)
    found = turn[0] if turn is not None else None
    if found is None or found is at or not list(_messages(context, passed.peer, found)):
        return None
    return found


def _is_sent_back(context: Context, passed: Passed) -> bool:
    """True if the rank that got a tensor sends its gradient back as it is."""
    return _sends(context, passed.peer, passed.rank, _gradient(context, passed))


def _messages(context: Context, rank: int, here: Location) -> Iterator[Passed]:
    """The messages that carry a tensor to other ranks."""
    if rank not in here.numbers:
        return
    value = context.ranks[rank].tensors[here.numbers[rank]].value
    for moved in context.ranks[rank].collectives:
        if moved.inside >= 0 or moved.backward_of >= 0:
            continue
        if moved.value is None or value is None or not _same(moved.value, value):
            continue
        for peer in _targets(moved, rank):
            if peer in context.ranks:
                yield Passed(rank, peer, here, moved, _received(context, peer, value))


def _targets(moved: Collective, rank: int) -> list[int]:
    """The ranks that get what a rank sends by a message, or by a broadcast."""
    if moved.name == "send":
        return [moved.peer]
    is_root = moved.name == "broadcast" and moved.peer == rank
    return [one for one in moved.ranks if one != rank] if is_root else []


def returned(context: Context, rank: int, moved: Collective) -> bool:
    """True if another rank that gets a tensor by a broadcast sends its gradient back by a
    message."""
    for peer in _targets(moved, rank):
        there = None if moved.value is None else _received(context, peer, moved.value)
        gradient = None if there is None else context.ranks[peer].tensors[there].gradient
        if _sends(context, peer, rank, gradient):
            return True
    return False


def _sends(context: Context, peer: int, rank: int, gradient: np.ndarray | None) -> bool:
    """True if a rank sends a gradient to another one as it is."""
    return any(
        _same(moved.value, gradient)
        for moved in context.ranks[peer].collectives
        if moved.name == "send" and moved.peer == rank
    )


def _received(context: Context, peer: int, value: np.ndarray) -> int | None:
    """The tensor on another rank that has these values; one with a gradient, if there is one."""
    found = [one for one in context.ranks[peer].tensors if _same(one.value, value)]
    found.sort(key=lambda one: one.gradient is None)
    return found[0].number if found else None


def _same(a: np.ndarray | None, b: np.ndarray | None) -> bool:
    return (
        a is not None
        and b is not None
        and a.size == b.size
        and bool((a.ravel() == b.ravel()).all())
    )


def _gradient(context: Context, passed: Passed) -> np.ndarray | None:
    """The gradient of a tensor on the rank that got it."""
    if passed.there is None:
        return None
    return context.ranks[passed.peer].tensors[passed.there].gradient


def _alike(a: Relation | None, b: Relation | None) -> bool:
    """True if two gradients are wrong in the same way."""
    if a is None or b is None or a.kind is not b.kind or a.kind is Kind.EQUAL:
        return False
    k, other = scaled(a), scaled(b)
    return k is None or (other is not None and abs(k - other) < 1e-6 * max(1.0, abs(k)))


def _not_sent_back(context: Context, one: Compared, passed: Passed, final: Relation) -> Finding:
    sent, peer = passed.sent, passed.peer
    module = passed.here.key[1] or module_of(one.name)
    return Finding(
        final.kind,
        detail(final, context),
        (one.name,),
        Place(module, sent.line, sent.text, _lines(context, passed)),
        f"a message of the gradient from rank {peer} to rank {passed.rank}",
        f"Rank {passed.rank} sends this tensor to rank {peer}, where no gradient of it is "
        f"computed: what rank {peer} does with it has no share in the gradient.",
    )


def _lines(context: Context, passed: Passed) -> tuple[str, ...]:
    """The line that receives a tensor."""
    found = [
        f"{c.line}: {c.text}"
        for c in context.ranks[passed.peer].collectives
        if c.name == "receive" and c.peer in (passed.rank, -1) and c.inside < 0
    ]
    return tuple(dict.fromkeys(found))[:1]


def _changed(
    context: Context, one: Compared, passed: Passed, all_passed: Sequence[Passed], final: Relation
) -> Finding:
    """The other rank has a gradient, and this rank another one: of the messages that bring
    gradients back, and what happens before and after, the first that is not right."""
    rank, peer = passed.rank, passed.peer
    gradient = _gradient(context, passed)
    mine = context.ranks[rank].tensors[passed.here.numbers[rank]].gradient
    assert gradient is not None
    near = context.locations.gradients.near
    back = [
        moved
        for moved in context.ranks[peer].collectives
        if moved.name == "send" and moved.peer == rank and moved.inside < 0
        and moved.value is not None and moved.value.size == gradient.size
    ]  # fmt: skip

    def is_right(value: np.ndarray | None) -> bool:
        return value is not None and value.size == gradient.size and near(
            value.ravel(), gradient.ravel())  # fmt: skip

    def is_wrong(value: np.ndarray | None) -> bool:
        return value is not None and mine is not None and value.size == mine.size and near(
            value.ravel(), mine.ravel())  # fmt: skip

    if len(all_passed) > 1:  # it is a sum, of which this is a term
        mine = None
    sent = [moved for moved in back if is_right(moved.value)]
    about = final.kind, detail(final, context), (one.name,)
    module = passed.here.key[1]
    if sent:
        line = f"{sent[0].line}: {sent[0].text}"
        call = _changing(context, rank, is_right, is_wrong)
        if call is not None:
            return Finding(
                *about,
                Place(call.module or module, call.line, call.text, (line,)),
                "",
                f"Rank {peer} sends the gradient of this tensor back as it should be, and rank "
                f"{rank} changes it here before its backward pass.",
            )
        peers = dict.fromkeys(each.peer for each in all_passed)
        who = " and ".join(f"rank {each}" for each in peers)
        return Finding(
            *about,
            Place(module, *_begun(context, rank, sent[0]), (line,)),
            "",
            f"What {who} compute{'s' * (len(peers) == 1)} of this tensor's gradient is sent back, "
            f"and the backward pass of rank {rank} begins with something else.",
        )
    if back:
        k = _multiple(back[-1].value, gradient)
        how = f"{factor_text(k)} times it" if k else "something else"
        call = _changing(context, peer, is_right, lambda value: _same(value, back[-1].value))
        also = () if call is None else (f"{call.line}: {call.text}",)
        return Finding(
            *about,
            Place(module, back[-1].line, back[-1].text, also),
            "",
            f"Rank {peer} has the gradient of this tensor as it should be, and sends {how} back to "
            f"rank {rank}.",
        )
    return Finding(
        *about,
        Place(module, passed.sent.line, passed.sent.text, _lines(context, passed)),
        f"a message of the gradient from rank {peer} to rank {rank}",
        f"Rank {rank} sends this tensor to rank {peer}, which computes its gradient; no message "
        f"brings it back.",
    )


def _begun(context: Context, rank: int, sent: Collective) -> tuple[str, str]:
    """The line of a rank that receives a message."""
    record = context.ranks[rank]
    found = [c for c in record.collectives if c.name == "receive" and c.inside < 0]
    size = None if sent.value is None else sent.value.size
    alike = [c for c in found if [int(np.prod(shape)) for shape in c.received] == [size]]
    last = (alike or found or [sent])[-1]
    return last.line, last.text


def _changing(
    context: Context,
    rank: int,
    before: Callable[[np.ndarray | None], bool],
    after: Callable[[np.ndarray | None], bool],
) -> Call | None:
    """The first call of a rank that makes one value of another one."""
    record = context.ranks[rank]
    for call in record.calls:
        if call.inputs and any(before(record.tensors[n].value) for n in call.inputs):
            outputs = [record.tensors[n].value for n in call.outputs]
            if any(after(one) and not before(one) for one in outputs):
                return call
    return None


def _multiple(given: np.ndarray | None, expected: np.ndarray) -> float | None:
    """k such that values are k times the expected ones."""
    square = float((np.abs(expected) ** 2).sum())
    if given is None or not square:
        return None
    k = float((given.ravel() * expected.ravel().conj()).sum().real) / square
    return k if np.allclose(given.ravel(), k * expected.ravel(), rtol=1e-6, atol=0) else None
