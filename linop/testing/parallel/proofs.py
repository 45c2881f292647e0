"""Forward and backward of `autograd.Function`s that move data between ranks, as matrices: proofs
that one is the adjoint of the other, for the spaces that the program uses them between.

A tensor that ranks hold copies of is one vector: an embedding E sends its elements to all of their
copies. Its gradient is either whole on every rank, or each rank has a term of it. With F the
forward and G the backward on all copies, and D what picks one copy of each result (or sums terms),
the backward is right if G turns the gradient of the result into that of the argument, E* F* D*.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import scipy.sparse as sp

from linop.testing.parallel.findings import ranks_text
from linop.testing.parallel.locations import BLOCKS, TERMS, Location, Locations
from linop.testing.parallel.matrices import (
    Matrix,
    UndecidedError,
    check_values,
    joined_by_messages,
    matrix,
)
from linop.testing.parallel.recording.records import Call, Lifted, Record
from linop.testing.parallel.relations import Kind


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

    def undecided(self, why: str) -> Pair:
        """As one that cannot be told."""
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


def aligned(ranks: Iterable[Record]) -> Iterator[dict[int, Call]]:
    """Calls of `autograd.Function`s with collectives, by rank: those of one line of the program
    that are its k-th."""
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
    yield from joined_by_messages(ranks, keyed.values())


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
    about = first.name, first.line, _said(ranks, there), _said(ranks, back)
    if len(back) < len(there):
        return Pair(*about, "", None, "no gradient came back through it" if not back else
                    "a gradient came back on some ranks only")  # fmt: skip
    try:
        return _decided(locations, calls, there, back, about)
    except UndecidedError as error:
        return Pair(*about, "", None, str(error))


def _said(ranks: dict[int, Record], lifted: dict[int, Lifted]) -> str:
    """The collectives of one side, in words."""
    found: dict[str, None] = {}
    for rank, one in lifted.items():
        for moved in one.moved:
            about = ranks[rank].collectives[moved.number]
            over = f"over {ranks_text(about.ranks)}"
            if about.name in ("send", "receive"):
                ends = (rank, about.peer) if about.name == "send" else (about.peer, rank)
                over = f"from rank {ends[0]} to rank {ends[1]}"
            name = "message" if over.startswith("from") else about.name.replace("_", "-")
            found.setdefault(f"{name} {over}")
    return ", ".join(found) or "identity"


def _decided(
    locations: Locations,
    calls: dict[int, Call],
    there: dict[int, Lifted],
    back: dict[int, Lifted],
    about: tuple[str, str, str, str],
) -> Pair:
    inputs = _positions(locations.ranks, calls, there, back)
    F = matrix(locations.ranks, there, inputs[0], [range(len(o.made)) for o in there.values()])
    G = matrix(locations.ranks, back, [range(len(o.given)) for o in back.values()], inputs[1])
    before = Ends(locations, calls, "inputs", inputs[0], [one.given for one in there.values()])
    after = Ends(locations, calls, "outputs", [range(len(o.made)) for o in there.values()],
                 [one.made for one in there.values()])  # fmt: skip
    check_values(F, there, inputs[0], None)
    check_values(G, back, None, inputs[1])
    E, R, D = before.embedding, after.embedding, after.picking
    if G.shape != F.shape[::-1]:
        raise UndecidedError("gradients of some arguments only came back")
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
        raise UndecidedError("the spaces of its argument or result are not known")
    # The nearest way has the fewest wrong entries.
    out_form, in_form, given, wanted = min(ways, key=lambda way: _gap(way[2], way[3]).nnz)
    spaces = f"{before.text} to {after.text}; gradients {out_form} to {in_form}"
    gap = sp.coo_matrix(_gap(given, wanted))
    k = int(np.abs(gap.data).argmax())
    row, column = int(gap.row[k]), int(gap.col[k])
    found, right = sp.csr_matrix(given)[row, column], sp.csr_matrix(wanted)[row, column]
    what = f"entry ({row}, {column}) of it is {found:g}, and {right:g} of the adjoint"
    return Pair(*about, spaces, False, what)


def _same(a: Matrix, b: Matrix) -> bool:
    return bool(a.shape == b.shape and _gap(a, b).nnz == 0)


def _gap(a: Matrix, b: Matrix) -> Matrix:
    gap = sp.csr_matrix(a - b)
    gap.data[np.abs(gap.data) < 1e-12] = 0
    gap.eliminate_zeros()
    return gap


def _positions(
    ranks: dict[int, Record],
    calls: dict[int, Call],
    there: dict[int, Lifted],
    back: dict[int, Lifted],
) -> tuple[list[list[int]], list[list[int]]]:
    """The arguments that have gradients: their positions among the arguments of the forward, and
    among the results of the backward, by rank. Those whose gradient goes nowhere, since no
    parameter is behind them, do not count, such as the tensor that a stage of a pipeline begins
    with."""
    arguments, results = [], []
    for rank, one in there.items():
        floats = [k for k, numbers in enumerate(one.given) if numbers.size]
        made = back[rank].made
        if len(made) == len(one.given):
            taken = [k for k in floats if made[k].size == one.given[k].size]
            inputs, behind = calls[rank].inputs, _trained(ranks[rank])
            wanted = [k for k in taken if k >= len(inputs) or inputs[k] in behind]
            taken = wanted if len(calls) > 1 and not _all_idle(ranks, calls) else taken
            arguments.append(taken)
            results.append(taken)
        else:
            raise UndecidedError("its arguments are not plain tensors")
    return arguments, results


def _all_idle(ranks: dict[int, Record], calls: dict[int, Call]) -> bool:
    """True if no argument of the calls has a parameter behind it."""
    return not any(_trained(ranks[r]).intersection(call.inputs) for r, call in calls.items())


def _trained(record: Record) -> set[int]:
    """Tensors that depend on parameters, on this or other ranks."""
    found = {one.number for one in record.tensors if one.parameter}
    for call in record.calls:
        if call.custom or found.intersection(call.inputs):
            found.update(call.outputs)
    for one in record.tensors:
        if found.intersection(one.sources):
            found.add(one.number)
    return found


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
        summed, self.told = False, True
        forms: dict[str, None] = {}
        keys: list[Any]
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
        self._summed = summed
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
                raise UndecidedError("some of its results are terms of a sum, and others are not")
        seen: Counter[int] = Counter()
        ordered = list(locations.ranks)
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
        if not self._summed and self._overlapping():
            return [False]
        if kinds and kinds <= {Kind.EQUAL, Kind.FACTOR}:
            return [True]
        if kinds == {Kind.UNSUMMED}:
            return [False]
        return [True, False]

    def _overlapping(self) -> bool:
        """True if these are blocks that share elements, and the ranks' gradients of a shared one
        are terms of the twin's."""
        for at in {id(one): one for one in self.found if one is not None}.values():
            if not at.matched or at.form != BLOCKS:
                continue
            theirs = self._locations.twin.tensors[at.twin].gradient
            mine = {r: t.gradient for r, t in self._locations.tensors(at).items()}
            if theirs is None or any(one is None for one in mine.values()):
                continue
            total, count = np.zeros(theirs.size, theirs.dtype), np.zeros(theirs.size, int)
            for rank, one in mine.items():
                assert one is not None
                np.add.at(total, at.selections[rank].ravel(), one.ravel())
                np.add.at(count, at.selections[rank].ravel(), 1)
            near = self._locations.gradients.near
            if (count > 1).any() and near(total[count > 0], theirs.ravel()[count > 0]):
                return True
        return False


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
