"""Forward or backward of an `autograd.Function` on all ranks as a matrix, from the elements that
each rank has followed through it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any

import numpy as np
import scipy.sparse as sp

from linop.testing.parallel.recording.records import Call, Collective, Lifted, Moved, Record

Matrix = Any
"""A sparse matrix of SciPy's."""
LARGEST = 2**18
"""Elements of the largest argument or result whose matrix is made."""


class UndecidedError(Exception):
    """A pair cannot be proven or disproven."""


def matrix(
    ranks: dict[int, Record],
    lifted: dict[int, Lifted],
    given: Sequence[Sequence[int]],
    made: Sequence[Sequence[int]],
) -> Matrix:
    """The matrix from the arguments of all ranks to the results of all ranks.

    Args:
        given, made: by rank, positions of the arguments and results that count.

    Raises:
        UndecidedError: it is no linear map, or too large.
    """
    first, sizes = {}, 0
    for rank, one in lifted.items():
        if one.unknown and any((numbers == -1).any() for numbers in one.made):
            raise UndecidedError(f"{one.unknown} in it is no movement of data")
        top = max([0, *(int(n.max()) for n in _numbers(one) if n.size)])
        first[rank] = sizes + 1  # of zero; what is unknown is in front of it
        sizes += top + 2
    if sizes > LARGEST:
        raise UndecidedError("its tensors are too large for a matrix")
    rows, columns, values = _equations(ranks, lifted, first)
    M = sp.csr_matrix((values, (rows, columns)), shape=(sizes, sizes))
    into = [
        np.concatenate([first[rank] + one.made[k].ravel() for k in chosen] or [np.zeros(0, int)])
        for (rank, one), chosen in zip(lifted.items(), made, strict=True)
    ]
    outof = [
        np.concatenate([first[rank] + one.given[k].ravel() for k in chosen] or [np.zeros(0, int)])
        for (rank, one), chosen in zip(lifted.items(), given, strict=True)
    ]
    targets, sources = np.concatenate(into), np.concatenate(outof)
    count = len(targets)
    zero = np.isin(targets, list(first.values()))  # the numbers of elements that are zero
    kept = np.flatnonzero(~zero)
    shape = (count, sizes)
    V = sp.csr_matrix((np.ones(len(kept)), (kept, targets[kept])), shape=shape)
    pick = sp.csr_matrix(
        (np.ones(len(sources)), (sources, np.arange(len(sources)))), shape=(sizes, len(sources))
    )
    total = V @ pick
    unknown = np.array([one - 1 for one in first.values()])
    for _ in range(10_000):
        if V[:, unknown].nnz:
            raise UndecidedError("what it moves is computed by something that is not looked at")
        V = V @ M
        if not V.nnz:
            return total
        total = total + V @ pick
    raise UndecidedError("it does not end")


def _numbers(one: Lifted) -> Iterator[np.ndarray]:
    yield from one.given
    yield from one.made
    for moved in one.moved:
        yield from (*moved.given, *moved.made)
    for made, given, _ in one.sums:
        yield from (made, given)


def _equations(
    ranks: dict[int, Record], lifted: dict[int, Lifted], first: dict[int, int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows, columns and coefficients: each element that was made, of others."""
    parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for rank, one in lifted.items():
        parts += [(made + first[rank], given + first[rank], k) for made, given, k in one.sums]
    for group in _together(ranks, lifted):
        parts += [
            (made + first[r], given + first[s], np.full(len(made), k))
            for r, made, s, given, k in _moved(group)
        ]
    if not parts:
        empty = np.zeros(0, np.int64)
        return empty, empty, np.zeros(0)
    rows, columns, values = (np.concatenate([np.asarray(p[k]) for p in parts]) for k in range(3))
    kept = ~np.isin(columns, list(first.values()))
    return rows[kept], columns[kept], values[kept]


def joined_by_messages(
    ranks: Iterable[Record], groups: Iterable[dict[int, Call]]
) -> list[dict[int, Call]]:
    """Calls, by rank, those of different lines put together of which one sends what the other one
    receives."""
    records = {one.rank: one for one in ranks}
    found: list[tuple[dict[int, Call], Counter[Any], Counter[Any]]] = []
    for calls in groups:
        sent, got = _messages(records, calls)
        open_ends, needs = sent - got, got - sent
        for at, (other, their_ends, their_needs) in enumerate(found):
            if (open_ends or needs) and (open_ends, needs) == (their_needs, their_ends):
                if not set(calls) & set(other):
                    found[at] = dict(sorted({**other, **calls}.items())), Counter(), Counter()
                    break
        else:
            found.append((calls, open_ends, needs))
    return [calls for calls, _, _ in found]


def _messages(
    records: dict[int, Record], calls: dict[int, Call]
) -> tuple[Counter[Any], Counter[Any]]:
    """The messages of the forward of calls, by source, target and tag: sent, and received."""
    sent: Counter[Any] = Counter()
    got: Counter[Any] = Counter()
    for rank, call in calls.items():
        for one in records[rank].lifted:
            if one.call != call.number or one.backward:
                continue
            for moved in one.moved:
                about = records[rank].collectives[moved.number]
                if about.name == "send":
                    sent[rank, about.peer, about.tag] += 1
                elif about.name == "receive":
                    got[about.peer, rank, about.tag] += 1
    return sent, got


Part = tuple[Collective, Moved]


def _together(ranks: dict[int, Record], lifted: dict[int, Lifted]) -> Iterator[dict[int, Part]]:
    """The parts of each collective by rank: the k-th of its name and group."""
    keyed: dict[tuple[Any, ...], dict[int, Part]] = {}
    for rank, one in lifted.items():
        seen: Counter[tuple[Any, ...]] = Counter()
        for moved in one.moved:
            about = ranks[rank].collectives[moved.number]
            key: tuple[Any, ...] = (about.name, about.ranks)
            if about.name == "send":
                key = ("message", rank, about.peer, about.tag)
            elif about.name == "receive":
                key = ("message", about.peer, rank, about.tag)
            seen[key] += 1
            keyed.setdefault((*key, seen[key]), {})[rank] = about, moved
    yield from keyed.values()


Piece = tuple[int, np.ndarray, int, np.ndarray, float]
"""A rank, numbers of its elements, the rank they are from, numbers there, and a coefficient."""


def _moved(group: dict[int, Part]) -> Iterator[Piece]:
    about = next(iter(group.values()))[0]
    members = about.ranks
    name = about.name
    given = {r: _joined(moved.given) for r, (_, moved) in group.items()}
    made = {r: _joined(moved.made) for r, (_, moved) in group.items()}
    if name in ("send", "receive"):
        for r, (one, _) in group.items():
            if one.name == "receive":
                yield r, made[r], one.peer, _given(given, one.peer), 1.0
        return
    if name == "unread":
        raise UndecidedError("it has a call of MPI that is not looked at")
    if set(group) != set(members):
        raise UndecidedError(f"some ranks take no part in the {name.replace('_', '-')}")
    if about.reduction not in ("", "sum", "average"):
        raise UndecidedError(f"its {name.replace('_', '-')} is of {about.reduction}")
    k = 1 / len(members) if about.reduction == "average" else 1.0
    n = len(members)
    for at, r in enumerate(members):
        if name == "all_reduce":
            for s in members:
                yield r, made[r], s, given[s], k
        elif name == "reduce_scatter":
            for s in members:
                yield r, made[r], s, _chunks(group[s], given[s], 0, n)[at], k
        elif name == "broadcast":
            yield r, made[r], about.peer, given[about.peer], 1.0
        elif name == "all_gather" or (name == "gather" and r == about.peer):
            for s, piece in zip(members, _chunks(group[r], made[r], 1, n), strict=True):
                yield r, piece, s, given[s], 1.0
        elif name == "scatter":
            parts = _chunks(group[about.peer], given[about.peer], 0, n)
            yield r, made[r], about.peer, parts[at], 1.0
        elif name == "reduce":
            if r == about.peer:
                for s in members:
                    yield r, made[r], s, given[s], k
        elif name == "all_to_all":
            for other, s in enumerate(members):
                theirs = _chunks(group[s], given[s], 0, n)[at]
                yield r, _chunks(group[r], made[r], 1, n)[other], s, theirs, 1.0
        elif name in ("scan", "exclusive_scan"):
            for s in members[: at + (name == "scan")]:
                if len(made[r]):
                    yield r, made[r], s, given[s], k


def _given(given: dict[int, np.ndarray], rank: int) -> np.ndarray:
    if rank not in given:
        raise UndecidedError(f"rank {rank}, which sends, does not call it")
    return given[rank]


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([one.ravel() for one in arrays]) if arrays else np.zeros(0, np.int64)


def _chunks(part: Part, numbers: np.ndarray, side: int, n: int) -> list[np.ndarray]:
    """An argument (side 0) or result (side 1) of an all-to-all, by rank."""
    about, moved = part
    tensors = moved.given if side == 0 else moved.made
    if len(tensors) == n and n > 1:
        return [one.ravel() for one in tensors]
    splits = (about.splits or ([], []))[side]
    if not splits:
        return np.split(numbers, n)
    rows = sum(splits)
    each = len(numbers) // rows if rows else 0
    return np.split(numbers, np.cumsum(splits)[:-1] * each)


def check_values(
    M: Matrix,
    lifted: dict[int, Lifted],
    given: Sequence[Sequence[int]] | None,
    made: Sequence[Sequence[int]] | None,
) -> None:
    """Check that a matrix makes the results of the arguments, where values were kept: operations of
    other packages than torch may have been missed.

    Args:
        given, made: by rank, positions of the arguments and results that count; None for all.

    Raises:
        UndecidedError: it does not.
    """
    if not all(one.values and one.results for one in lifted.values()):
        return
    x, y = (
        np.concatenate(
            [
                values[k].ravel()
                for one, which in zip(lifted.values(), chosen or repeat(None), strict=False)
                for values in [one.values if side == 0 else one.results]
                for k in (range(len(values)) if which is None else which)
            ]
            or [np.zeros(0)]
        )
        for side, chosen in enumerate((given, made))
    )
    if (len(y), len(x)) != M.shape:
        return
    size = abs(M) @ np.abs(x) + np.abs(y)
    if (np.abs(M @ x - y) > 2.0**-18 * size.max(initial=0.0)).any():
        raise UndecidedError("something in it computes that is not looked at, or it is not linear")
