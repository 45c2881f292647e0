"""Forward and backward of `autograd.Function`s that move data between ranks, as matrices: proofs
that one is the adjoint of the other, for the spaces that the program uses them between.

A tensor that ranks hold copies of is one vector: an embedding E sends its elements to all of their
copies. Its gradient is either whole on every rank, or each rank has a term of it. With F the
forward and G the backward on all copies, and D what picks one copy of each result (or sums terms),
the backward is right if G turns the gradient of the result into that of the argument, E* F* D*.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any

import numpy as np
import scipy.sparse as sp

from linop.testing.parallel.findings import ranks_text
from linop.testing.parallel.locations import TERMS, Location, Locations
from linop.testing.parallel.records import Call, Collective, Record
from linop.testing.parallel.relations import Kind
from linop.testing.parallel.shadows import Lifted, Moved

Matrix = Any
"""A sparse matrix of SciPy's."""
LARGEST = 2**18
"""Elements of the largest argument or result whose matrix is made."""


@dataclass(frozen=True)
class Pair:
    """A forward and a backward movement.

    Attributes:
        name: the function's.
        line: of its call.
        forward, backward: their collectives.
        spaces: the form of argument and result, and of their gradients.
        proven: True if the backward is the adjoint of the forward between these spaces, exactly;
            False if it is not; None if that cannot be told.
        counterexample: the entry that is wrong, or the reason why it cannot be told.
    """

    name: str
    line: str
    forward: str
    backward: str
    spaces: str
    proven: bool | None
    counterexample: str = ""

    def __str__(self) -> str:
        verdict = {True: "adjoint, proven", False: "NOT the adjoint", None: "not decided"}
        text = f"{self.line} {self.name}: {self.forward} / {self.backward}: {verdict[self.proven]}"
        rest = "; ".join(filter(None, [self.spaces, self.counterexample]))
        return f"{text} ({rest})" if rest else text

    def undecided(self) -> Pair:
        """Of a program that is right: these spaces are not the ones that it has in mind."""
        why = "it is right by numbers, between other spaces than these"
        return replace(self, proven=None, counterexample=why)

    def as_dict(self) -> dict[str, Any]:
        return vars(self)


def pairs(locations: Locations) -> tuple[list[Pair], dict[tuple[int, int], str]]:
    """All pairs of a program, in order, and a sentence for each call (rank, number) whose backward
    is not the adjoint."""
    found, broken = [], {}
    for calls in aligned(locations.ranks.values()):
        pair = _pair(locations, calls)
        if pair is None:
            continue
        found.append(pair)
        if pair.proven is False:
            for rank, call in calls.items():
                broken[rank, call.number] = (
                    f"Forward: {pair.forward}. Backward: {pair.backward}, which is not the adjoint "
                    f"between these spaces ({pair.spaces}): {pair.counterexample}."
                )
    return found, broken


def aligned(ranks: Any) -> Iterator[dict[int, Call]]:
    """Calls of `autograd.Function`s with collectives, by rank: those of one line of the program that
    are its k-th."""
    keyed: dict[tuple[Any, ...], dict[int, Call]] = {}
    for record in ranks:
        lifted = {one.call for one in record.lifted}
        seen: Counter[tuple[str, str, str]] = Counter()
        for call in record.calls:
            if not call.custom or call.number not in lifted or call.phase != "forward":
                continue
            if call.inside >= 0:
                continue
            key = call.name, call.module, call.line
            seen[key] += 1
            keyed.setdefault((*key, seen[key]), {})[record.rank] = call
    yield from keyed.values()


def _pair(locations: Locations, calls: dict[int, Call]) -> Pair | None:
    ranks = locations.ranks
    there: dict[int, Lifted] = {}
    back: dict[int, Lifted] = {}
    for rank, call in calls.items():
        for one in ranks[rank].lifted:
            if one.call == call.number:
                (back if one.backward else there)[rank] = one
    first = next(iter(calls.values()))
    if not there or not any(one.moved for one in (*there.values(), *back.values())):
        return None
    said = [_said(ranks, side) for side in (there, back)]
    about = first.name, first.line, *said
    if len(back) < len(there):
        return Pair(*about, "", None, "no gradient came back through it" if not back else
                    "a gradient came back on some ranks only")  # fmt: skip
    try:
        return _decided(locations, calls, there, back, about)
    except _UndecidedError as error:
        return Pair(*about, "", None, str(error))


class _UndecidedError(Exception):
    """A pair cannot be proven or disproven."""


def _said(ranks: dict[int, Record], lifted: dict[int, Lifted]) -> str:
    """The collectives of one side, in words."""
    found: dict[str, None] = {}
    for rank, one in lifted.items():
        for moved in one.moved:
            about = ranks[rank].collectives[moved.number]
            over = ranks_text(about.ranks)
            found.setdefault(f"{about.name.replace('_', '-')} over {over}")
    return ", ".join(found) or "identity"


def _decided(
    locations: Locations,
    calls: dict[int, Call],
    there: dict[int, Lifted],
    back: dict[int, Lifted],
    about: tuple[str, str, str, str],
) -> Pair:
    inputs = _positions(calls, there, back)
    F = matrix(locations.ranks, there, inputs[0], [range(len(o.made)) for o in there.values()])
    G = matrix(locations.ranks, back, [range(len(o.given)) for o in back.values()], inputs[1])
    before = Ends(locations, calls, "inputs", inputs[0], [one.given for one in there.values()])
    after = Ends(locations, calls, "outputs", [range(len(o.made)) for o in there.values()],
                 [one.made for one in there.values()])  # fmt: skip
    _check_values(F, there, inputs[0], None)
    _check_values(G, back, None, inputs[1])
    E, R, D = before.embedding, after.embedding, after.picking
    if G.shape != F.shape[::-1]:
        raise _UndecidedError("gradients of some arguments only came back")
    # The space of the argument: replicated where the ranks hold copies, else of each rank's own.
    pulled = E.T @ F.T @ D.T
    ways = []
    for whole_out in after.representations():
        G_out = G @ R if whole_out else G
        wanted = pulled if whole_out else pulled @ R.T
        ways.append(("whole" if whole_out else "terms", "terms", E.T @ G_out, wanted))
        ways.append(("whole" if whole_out else "terms", "whole", G_out, E @ wanted))
    for out_form, in_form, given, wanted in ways:
        if _same(given, wanted):
            spaces = f"{before.text} to {after.text}; gradients {out_form} to {in_form}"
            return Pair(*about, spaces, True)
    if not before.told or not after.told:
        raise _UndecidedError("the spaces of its argument or result are not known")
    # The nearest way has the fewest wrong entries.
    out_form, in_form, given, wanted = min(ways, key=lambda way: _gap(way[2], way[3]).nnz)
    spaces = f"{before.text} to {after.text}; gradients {out_form} to {in_form}"
    gap = sp.coo_matrix(_gap(given, wanted))
    k = int(np.abs(gap.data).argmax())
    row, column = int(gap.row[k]), int(gap.col[k])
    found, right = sp.csr_matrix(given)[row, column], sp.csr_matrix(wanted)[row, column]
    what = f"entry ({row}, {column}) of it is {found:g}, and {right:g} of the adjoint"
    return Pair(*about, spaces, False, what)


def _check_values(
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
        _UndecidedError: it does not.
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
        raise _UndecidedError("something in it computes that is not looked at, or it is not linear")


def _same(a: Matrix, b: Matrix) -> bool:
    return a.shape == b.shape and _gap(a, b).nnz == 0


def _gap(a: Matrix, b: Matrix) -> Matrix:
    gap = sp.csr_matrix(a - b)
    gap.data[np.abs(gap.data) < 1e-12] = 0
    gap.eliminate_zeros()
    return gap


def _positions(
    calls: dict[int, Call], there: dict[int, Lifted], back: dict[int, Lifted]
) -> tuple[list[list[int]], list[list[int]]]:
    """The arguments that have gradients: their positions among the arguments of the forward, and
    among the results of the backward, by rank."""
    del calls
    arguments, results = [], []
    for rank, one in there.items():
        floats = [k for k, numbers in enumerate(one.given) if numbers.size]
        made = back[rank].made
        if len(made) == len(one.given):
            taken = [k for k in floats if made[k].size == one.given[k].size]
            arguments.append(taken)
            results.append(taken)
        else:
            raise _UndecidedError("its arguments are not plain tensors")
    return arguments, results


# The matrix of one side


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
        _UndecidedError: it is no linear map, or too large.
    """
    first, sizes = {}, 0
    for rank, one in lifted.items():
        if one.unknown and any((numbers == -1).any() for numbers in one.made):
            raise _UndecidedError(f"{one.unknown} in it is no movement of data")
        top = max([0, *(int(n.max()) for n in _numbers(one) if n.size)])
        first[rank] = sizes
        sizes += top + 1
    if sizes > LARGEST:
        raise _UndecidedError("its tensors are too large for a matrix")
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
    for _ in range(10_000):
        V = V @ M
        if not V.nnz:
            return total
        total = total + V @ pick
    raise _UndecidedError("it does not end")


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
    kept = (columns >= 0) & ~np.isin(columns, list(first.values()))
    return rows[kept], columns[kept], values[kept]


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
    if set(group) != set(members):
        raise _UndecidedError(f"some ranks take no part in the {name.replace('_', '-')}")
    if about.reduction not in ("", "sum", "average"):
        raise _UndecidedError(f"its {name.replace('_', '-')} is of {about.reduction}")
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
        raise _UndecidedError(f"rank {rank}, which sends, does not call it")
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


# Spaces


class Ends:
    """The space of the arguments, or of the results, of a call on all ranks.

    Attributes:
        embedding: E, from the elements of the space to all copies.
        picking: D, from copies to the elements.
        text: its form.
        told: True if it is known to be that of the twin's tensor.
    """

    def __init__(
        self,
        locations: Locations,
        calls: dict[int, Call],
        side: str,
        chosen: Sequence[Sequence[int]],
        arrays: Sequence[Sequence[np.ndarray]],
    ) -> None:
        self._locations, self._calls, self._side = locations, calls, side
        rows: list[np.ndarray] = []
        self.found: list[Location | None] = []
        summed, forms, self.told = False, {}, True
        labels: dict[Any, int] = {}
        for (rank, call), positions, each in zip(calls.items(), chosen, arrays, strict=True):
            numbers = getattr(call, side)
            for k in positions:
                size = each[k].size
                at = locations.at.get((rank, numbers[k])) if k < len(numbers) else None
                self.found.append(at)
                if at is not None and at.matched and at.form != TERMS:
                    forms[at.form] = None
                    keys = [("twin", at.twin, int(e)) for e in at.selections[rank].ravel()]
                elif at is not None and at.matched:
                    forms[TERMS] = None
                    summed = True
                    keys = [("term", rank, k, e) for e in range(size)]
                else:
                    owner, copied = _first_copy(locations, at, rank)
                    forms["copies" if copied else "each rank's own"] = None
                    self.told = self.told and at is not None
                    keys = [(owner, k, e) for e in range(size)]
                rows.append(np.array([labels.setdefault(key, len(labels)) for key in keys], int))
        index = np.concatenate(rows) if rows else np.zeros(0, int)
        count = len(labels)
        ones = np.ones(len(index))
        self.embedding = sp.csr_matrix((ones, (np.arange(len(index)), index)),
                                       shape=(len(index), count))  # fmt: skip
        firsts = np.unique(index, return_index=True)[1]
        self.picking = sp.csr_matrix((np.ones(count), (np.arange(count), firsts)),
                                     shape=(count, len(index)))  # fmt: skip
        if summed:
            self._of_terms(locations)
        self.text = ", ".join(forms) or "nothing"

    def _of_terms(self, locations: Locations) -> None:
        """Terms of sums: the element of the space is their sum, and each term has its whole
        gradient."""
        labels: dict[Any, int] = {}
        rows = []
        for at in self.found:
            if at is None or at.form != TERMS:
                raise _UndecidedError("some of its results are terms of a sum, and others are not")
        seen: Counter[int] = Counter()
        ordered = [rank for rank in locations.ranks]
        position = 0
        for at in self.found:
            assert at is not None
            rank = [r for r in ordered if r in at.numbers][seen[id(at)] % len(at.numbers)]
            seen[id(at)] += 1
            group = next(g for g in at.groups if rank in g)
            keys = [(group, id(at), e) for e in range(at.selections[rank].size)]
            rows.append(np.array([labels.setdefault(key, len(labels)) for key in keys], int))
            position += len(keys)
        index = np.concatenate(rows)
        ones = np.ones(len(index))
        shape = (len(index), len(labels))
        self.embedding = sp.csr_matrix((ones, (np.arange(len(index)), index)), shape=shape)
        self.picking = self.embedding.T

    def representations(self) -> list[bool]:
        """True: gradients are whole on every rank that has a copy. False: terms. What is known of
        the tensors themselves decides, else of those that are computed from them next."""
        known = [at for at in self.found if at is not None and at.gradient is not None]
        if not known and self._side == "outputs":
            known = [
                at
                for rank, call in self._calls.items()
                for number in call.outputs
                for at in self._locations.known_after(rank, number)
            ]
        kinds = {at.gradient.kind for at in known if at.gradient is not None}
        if kinds and kinds <= {Kind.EQUAL, Kind.FACTOR}:
            return [True]
        if kinds == {Kind.UNSUMMED}:
            return [False]
        return [True, False]


def _first_copy(locations: Locations, at: Location | None, rank: int) -> tuple[int, bool]:
    """The first rank that has the same values, and whether another one has."""
    if at is None:
        return rank, False
    values = {r: t.value for r, t in locations.tensors(at).items()}
    mine = values[rank]
    same = [
        r
        for r, one in values.items()
        if one is not None and mine is not None and locations.values.near(one, mine)
    ]
    return min(same, default=rank), len(same) > 1
