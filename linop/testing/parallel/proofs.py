"""Forward and backward of `autograd.Function`s that move data between ranks, as operators: proofs
that one is the adjoint of the other, for the spaces that the program uses them between.

A tensor that ranks hold copies of is one vector: an embedding E sends its elements to all of their
copies. Its gradient is either whole on every rank, or each rank has a term of it. With F the
forward and G the backward on the tensors of all ranks, and D what picks one copy of each result (or
sums terms), the backward is right if G turns the gradient of the result into that of the argument,
E* F* D*. All are `LinearOperator`s, and are compared exactly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import scipy.sparse as sp

from linop import LinearOperator
from linop.spaces.space import Space
from linop.testing.parallel.findings import ranks_text
from linop.testing.parallel.lifting import operator, place_of
from linop.testing.parallel.locations import Locations
from linop.testing.parallel.matrices import (
    Matrix,
    UndecidedError,
    check_values,
    joined_by_messages,
    matrix,
)
from linop.testing.parallel.recording.records import Call, Lifted, Record
from linop.testing.parallel.spaces import Ends


@dataclass(frozen=True)
class Pair:
    """A forward and a backward movement.

    Attributes:
        name: the function's.
        line: of its call.
        forward, backward: their collectives.
        spaces: the forms of the argument and of the result.
        proven: True if the backward is the adjoint of the forward between these spaces, exactly;
            False if it is not; None if that cannot be told.
        counterexample: the entry that is wrong, or the reason why it cannot be told.
        operator, adjoint: the forward and the backward, on the arguments ``x0.1`` (position 0, rank
            1) and results ``y0.1`` of all ranks, flat; None if they are not known.
        otherwise: other spaces, between which it is the adjoint.
        unless: a sentence about other spaces that it may have, between which it is not.
        lost: True if no gradient came back through it.
        factor: k, if the backward is k times the transposed forward, and so k times its adjoint.
    """

    name: str
    line: str
    forward: str
    backward: str
    spaces: str
    proven: bool | None
    counterexample: str = ""
    operator: LinearOperator | None = field(default=None, compare=False, repr=False)
    adjoint: LinearOperator | None = field(default=None, compare=False, repr=False)
    otherwise: str = ""
    unless: str = ""
    lost: bool = False
    factor: float = 1.0

    def __str__(self) -> str:
        verdict = {True: "adjoint, proven", False: "NOT the adjoint", None: "not decided"}
        text = f"{self.line} {self.name}: {self.forward} / {self.backward}: {verdict[self.proven]}"
        rest = "; ".join(filter(None, [self.spaces, self.counterexample]))
        return f"{text} ({rest})" if rest else text

    @property
    def to_copies(self) -> bool:
        """True if its result is, or may be, copies."""
        return "copies" in self.spaces.rpartition(" to ")[2] or self.unless.endswith("copies")

    @property
    def sentence(self) -> str:
        """The fault that it is, or may be."""
        head = f"Forward: {self.forward}. Backward: {self.backward}"
        if self.proven is False:
            return (
                f"{head}, which is not the adjoint between these spaces ({self.spaces}): "
                f"{self.counterexample}."
            )
        if self.lost:
            return f"{head}: no gradient comes back through it."
        return f"{head}: {self.unless}."

    def undecided(self, why: str) -> Pair:
        """As one that cannot be told."""
        return replace(self, proven=None, counterexample=why)

    def as_otherwise(self) -> Pair:
        """As one between the other spaces, between which it is the adjoint."""
        return replace(self, spaces=self.otherwise, proven=True, counterexample="")

    def as_dict(self) -> dict[str, Any]:
        """As data for JSON; operators as text."""
        texts = {name: op if op is None else str(op) for name, op in (
            ("operator", self.operator), ("adjoint", self.adjoint))}  # fmt: skip
        return {**vars(self), **texts}


Pairs: TypeAlias = dict[tuple[int, int], Pair]
"""By rank and number of calls."""


def pairs(locations: Locations) -> tuple[list[Pair], Pairs, Pairs]:
    """All pairs of a program, in order; those whose backward is not the adjoint; and those whose
    backward is not, between spaces that they may have."""
    found: list[Pair] = []
    broken: Pairs = {}
    suspect: Pairs = {}
    for calls in aligned(locations.ranks.values()):
        pair = _pair(locations, calls)
        if pair is None:
            continue
        found.append(pair)
        into = broken if pair.proven is False else suspect
        if pair.proven is False or pair.unless or (pair.lost and _has_gradient(locations, calls)):
            into |= {(rank, call.number): pair for rank, call in calls.items()}
    return found, broken, suspect


def _has_gradient(locations: Locations, calls: dict[int, Call]) -> bool:
    """True if what a call makes has a gradient in the twin."""
    for rank, call in calls.items():
        for number in call.outputs:
            at = locations.at.get((rank, number))
            if at is not None and at.matched:
                return locations.twin.tensors[at.twin].gradient is not None
    return False


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
        why = "a gradient came back on some ranks only" if back else "no gradient came back"
        return Pair(*about, "", None, f"{why} through it", lost=not back)
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
) -> Pair | None:
    inputs = _positions(locations.ranks, calls, there, back)
    results = [range(len(one.made)) for one in there.values()]
    M = matrix(locations.ranks, there, inputs[0], results)
    N = matrix(locations.ranks, back, [range(len(o.given)) for o in back.values()], inputs[1])
    check_values(M, there, inputs[0], None)
    check_values(N, back, None, inputs[1])
    before, after = (
        Ends(locations, calls, side, chosen, [[n.size for n in arrays] for arrays in each])
        for side, chosen, each in (
            ("inputs", inputs[0], [one.given for one in there.values()]),
            ("outputs", results, [one.made for one in there.values()]),
        )
    )
    if N.shape != M.shape[::-1]:
        raise UndecidedError("gradients of some arguments only came back")
    if not _moves(M, after.arrays, before.arrays) and not _moves(N, before.arrays, after.arrays):
        return None  # its collectives move something else, as FSDP's do parameters' gradients
    F = operator(M, before.arrays, after.arrays)
    G = operator(N, after.arrays, before.arrays)
    E, R, D = before.embedding, after.embedding, after.picking
    summed = _sums(M, after.arrays, before.arrays)
    used = before.ranks_used(M)
    alone = before.spread and len(used) == 1
    wrong, otherwise, sure = [], "", None
    likely = after.representations()
    for whole_out in dict.fromkeys([*likely, *([True, False] if after.spread else [])]):
        pulled = E.H @ F.H @ D.H if whole_out else E.H @ F.H @ D.H @ R.H
        gradient = G @ R if whole_out else G
        for whole_in in (False, True) if before.spread else (True,):
            ways = (gradient, E @ pulled) if whole_in else (E.H @ gradient, pulled)
            form = before.text(whole_in, summed, alone and not whole_in)
            spaces = f"{form} to {after.text(whole_out)}"
            if ways[0].equals(ways[1]):
                if whole_out in likely:
                    sure = sure or Pair(*about, spaces, True, operator=F, adjoint=G)
                otherwise = otherwise or spaces
                break
            if whole_out in likely:
                wrong.append((spaces, *ways))
    if sure is not None:
        if len(likely) > 1 and (other := _unlike(sure.spaces, [one[0] for one in wrong])):
            forms = [each.rpartition(" to ")[2] for each in (sure.spaces, other)]
            why = f"adjoint if its result is {forms[0]}, and not if it is {forms[1]}"
            return replace(sure, unless=why)
        return sure
    if not before.told or not after.told:
        raise UndecidedError("the spaces of its argument or result are not known")
    # The nearest way has the smallest share of wrong entries.
    nearest = wrong[:1] if alone else wrong
    spaces, found, wanted = min(nearest, key=lambda way: _share_of_gaps(way[1], way[2]))
    what = _counterexample(found, wanted, used.pop() if alone else None)
    k = _multiple(M, N)
    k = k if k and found.equals(k * wanted) else 1.0
    return Pair(*about, spaces, False, what, F, G, otherwise, factor=k)


def _multiple(M: Matrix, N: Matrix) -> float:
    """k such that N is k times M transposed; 0 if there is none."""
    transposed, total = sp.csr_matrix(M).T, float(sp.csr_matrix(M).sum())
    k = float(sp.csr_matrix(N).sum()) / total if total else 0.0
    return k if abs(sp.csr_matrix(N) - k * transposed).max() == 0 else 0.0


def _ranks(space: Space) -> np.ndarray:
    """The rank of each element."""
    return np.repeat([r.workers[0] for r in space.regions], [r.size for r in space.regions])


def _moves(M: Matrix, codomain: Space, domain: Space) -> bool:
    """True if a rank gets something of another one."""
    rows, columns = sp.csr_matrix(M).nonzero()
    return bool((_ranks(codomain)[rows] != _ranks(domain)[columns]).any())


def _unlike(spaces: str, others: Sequence[str]) -> str:
    """The first of other spaces whose result has another form."""
    form = spaces.rpartition(" to ")[2]
    return next((one for one in others if one.rpartition(" to ")[2] != form), "")


def _sums(M: Matrix, codomain: Space, domain: Space) -> bool:
    """True if each element that a movement makes is a sum of elements of several ranks."""
    rows, columns = sp.csr_matrix(M).nonzero()
    of = np.unique(np.stack([rows, _ranks(domain)[columns]]), axis=1)[0]
    return bool(len(of)) and bool((np.unique(of, return_counts=True)[1] > 1).all())


def _gap(a: LinearOperator, b: LinearOperator) -> Matrix:
    return (a - b).to_matrix("regions")


def _share_of_gaps(a: LinearOperator, b: LinearOperator) -> float:
    """The share of the entries of two matrices that are not equal."""
    gap = _gap(a, b)
    share: float = gap.nnz / max(1, gap.shape[0] * gap.shape[1])
    return share


def _counterexample(found: LinearOperator, wanted: LinearOperator, rank: int | None) -> str:
    """The largest wrong entry, in words.

    Args:
        rank: that which alone has the argument, if one has.
    """
    gap = sp.coo_matrix(_gap(found, wanted))
    k = int(np.abs(gap.data).argmax())
    row, column = int(gap.row[k]), int(gap.col[k])
    has, right = (sp.csr_matrix(op.to_matrix("regions"))[row, column] for op in (found, wanted))
    source, target = _element(found.domain, column), _element(found.codomain, row, rank)
    return (
        f"{target[0]} of the argument's gradient{target[1]} is {has:g} times {source[0]} of the "
        f"result's{source[1]}; by the adjoint {right:g} times"
    )


def _element(space: Space, index: int, of: int | None = None) -> tuple[str, str]:
    """An element in words, and its tensor."""
    first, position, element = place_of(space, index)
    rank = first if of is None else of
    several = any(int(region.name[1:].partition(".")[0]) for region in space.regions)
    return f"element {element}", f"{f' {position}' if several else ''} on rank {rank}"


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
