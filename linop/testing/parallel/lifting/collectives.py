"""A recorded collective, or messages, of several ranks as an operator of linop: an all-reduce is
`linop.all_reduce` of copies, an all-gather `linop.all_gather` of blocks as large as each rank's, a
message a move; those that linop has no name for are sums of additions of one rank's elements to
another one's.

The domain has a region for each rank that gives something, the codomain one for each rank that gets
something: the elements of its tensors, flat, one tensor after another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate

import linop
from linop import COPIES, LinearOperator, Partition, Region, Space, Subset, TensorSpace
from linop.operators.named_movement import NamedMovement, out_of_place
from linop.provenance import records_origin
from linop.testing.parallel.findings import ranks_text
from linop.testing.parallel.lifting.places import UndecidedError
from linop.testing.parallel.recording.records import Collective

MESSAGES = ("send", "receive")
Sizes = Mapping[int, Sequence[int]]
"""Elements of tensors, by rank."""


@dataclass(frozen=True)
class Lift:
    """A collective as an operator.

    Attributes:
        into, out_of: the names of the regions of the domain and of the codomain, by rank.
    """

    operator: LinearOperator
    into: Mapping[int, str]
    out_of: Mapping[int, str]


@dataclass(frozen=True)
class Ran:
    """A collective on all ranks of its group.

    Attributes:
        name: in MPI's words.
        ranks: in the order of the group.
        given, made: elements of its arguments and results on each rank, those of a message on its
            two ends.
        splits: by rank, the elements of the first dimension to and from each rank.
    """

    name: str
    ranks: tuple[int, ...]
    given: Sizes
    made: Sizes
    reduction: str = ""
    peer: int = -1
    splits: Mapping[int, tuple[list[int], list[int]] | None] = field(default_factory=dict)

    @staticmethod
    def of(parts: Mapping[int, Collective], given: Sizes, made: Sizes) -> Ran:
        """Of the records of all ranks.

        Raises:
            UndecidedError: they are no collective of all ranks of their group.
        """
        about = next(iter(parts.values()))
        if set(parts) != set(about.ranks):
            raise UndecidedError(f"some ranks take no part in the {spoken(about.name)}")
        splits = {rank: one.splits for rank, one in parts.items()}
        return Ran(about.name, about.ranks, given, made, about.reduction, about.peer, splits)

    def all_given(self, rank: int) -> int:
        """The number of elements that a rank gives."""
        return sum(self.given.get(rank, ()))

    def all_made(self, rank: int) -> int:
        """The number of elements that a rank gets."""
        return sum(self.made.get(rank, ()))


def spoken(name: str) -> str:
    return name.replace("_", "-")


def lifted(ran: Ran, name: str) -> Lift:
    """The operator of a collective.

    Args:
        name: the names of its regions begin with it.

    Raises:
        UndecidedError: it is not linear, unknown, or the sizes of its tensors do not fit.
    """
    if ran.reduction not in ("", "sum", "average"):
        raise UndecidedError(f"its {spoken(ran.name)} is of {ran.reduction}")
    build = _BUILDERS.get(ran.name)
    if build is None:
        raise UndecidedError(f"linop has no operator of its {spoken(ran.name)}")
    op = build(ran, name)
    if ran.reduction == "average":
        op = Fraction(1, len(ran.ranks)) * op
    sides = []
    for space, sizes in ((op.domain, ran.all_given), (op.codomain, ran.all_made)):
        held = {region.workers[0]: region for region in space.regions}
        for rank, region in held.items():
            if region.size != sizes(rank):
                raise UndecidedError(
                    f"tensors of the {spoken(ran.name)} have other sizes on rank {rank} than on "
                    f"other ranks"
                )
        sides.append({rank: region.name for rank, region in held.items()})
    return Lift(op, *sides)


def message(source: int, target: int, given: int, made: int, name: str) -> Lift:
    """The operator of a message: it moves what one rank gives to another one (paper, appendix A.3).

    Raises:
        UndecidedError: more is received than is sent, or less.
    """
    if given != made:
        raise UndecidedError(
            f"rank {source} sends {given} elements to rank {target}, which expects {made}"
        )
    a, b = (
        Region(f"{name}s@{source}", (given,), source),
        Region(f"{name}r@{target}", (made,), target),
    )
    return Lift(linop.move(Space(a), a, b), {source: a.name}, {target: b.name})


# Each collective


def _copies(ran: Ran, name: str, n: int) -> TensorSpace:
    return TensorSpace((n,), Partition((len(ran.ranks),), ran.ranks), axes=[COPIES], name=name)


def _blocks(ran: Ran, name: str, sizes: Sequence[int]) -> TensorSpace:
    grid = Partition((len(ran.ranks),), ran.ranks)
    return TensorSpace((sum(sizes),), grid, name=name, sizes={0: sizes})


def _one(ran: Ran, name: str, n: int) -> TensorSpace:
    return TensorSpace((n,), Partition((1,), [ran.peer]), name=name)


def _all_reduce(ran: Ran, name: str) -> LinearOperator:
    return linop.all_reduce(_copies(ran, name, ran.all_given(ran.ranks[0])), 0)


def _broadcast(ran: Ran, name: str) -> LinearOperator:
    grid = Partition((len(ran.ranks),), ran.ranks)
    return linop.broadcast(_one(ran, name, ran.all_given(ran.peer)), grid)


def _reduce(ran: Ran, name: str) -> LinearOperator:
    copies = _copies(ran, name, ran.all_given(ran.peer))
    return linop.sum_reduce(copies, Partition((1,), [ran.peer]))


def _all_gather(ran: Ran, name: str) -> LinearOperator:
    several = _each_apart(ran, name, _all_gather)
    return several or linop.all_gather(_blocks(ran, name, [ran.all_given(r) for r in ran.ranks]), 0)


def _reduce_scatter(ran: Ran, name: str) -> LinearOperator:
    several = _each_apart(ran, name, _reduce_scatter)
    if several is not None:
        return several
    sizes = [ran.all_made(rank) for rank in ran.ranks]
    if len(set(sizes)) == 1:
        return linop.reduce_scatter(_copies(ran, name, sum(sizes)), 0, 0)
    return linop.all_gather(_blocks(ran, name, sizes), 0).H


def _each_apart(
    ran: Ran, name: str, build: Callable[[Ran, str], LinearOperator]
) -> LinearOperator | None:
    """A collective of several tensors that are gathered or scattered each; None of one tensor, or
    of one in a piece for each rank."""
    counts = {(len(ran.given[rank]), len(ran.made[rank])) for rank in ran.ranks}
    (given, made), *others = counts
    if others or given != made or given < 2:
        return None
    parts = []
    for k in range(given):
        sent, got = ({r: [sizes[r][k]] for r in ran.ranks} for sizes in (ran.given, ran.made))
        one = Ran(ran.name, ran.ranks, sent, got)
        parts.append(build(one, f"{name}.{k}"))
    whole = linop.direct_sum(*parts)
    ends = []
    for space in (whole.domain, whole.codomain):
        joined, pairs = _joined(space, name, ran.ranks)
        ends.append((joined, pairs))
    enter = out_of_place(ends[0][0], whole.domain, [(b, a) for a, b in ends[0][1]])
    leave = out_of_place(whole.codomain, ends[1][0], ends[1][1])
    return leave @ whole @ enter


def _joined(
    space: Space, name: str, ranks: Sequence[int]
) -> tuple[Space, list[tuple[Subset, Subset]]]:
    """The space of one region for each rank, of the elements of all its regions in a space, and
    the pairs of parts that are the same."""
    regions, pairs = [], []
    for rank in ranks:
        held = space.on(rank)
        ends = list(accumulate((one.size for one in held), initial=0))
        whole = Region(f"{name}@{rank}", (ends[-1],), rank)
        regions.append(whole)
        pairs += [(one[:], whole[a : a + one.size]) for a, one in zip(ends, held, strict=False)]
    return Space(regions), pairs


def _gather(ran: Ran, name: str) -> LinearOperator:
    return linop.gather(_blocks(ran, name, [ran.all_given(r) for r in ran.ranks]), ran.peer)


def _scatter(ran: Ran, name: str) -> LinearOperator:
    blocks = _blocks(ran, name, [ran.all_made(rank) for rank in ran.ranks])
    return linop.scatter(_one(ran, name, sum(blocks.global_shape)), blocks)


def _all_to_all(ran: Ran, name: str) -> LinearOperator:
    """The chunk that each rank has for each other one, from where it lies in what the one gives to
    where it lies in what the other gets: a block permutation (paper, section 3)."""
    given = {rank: _chunks(ran, rank, 0) for rank in ran.ranks}
    made = {rank: _chunks(ran, rank, 1) for rank in ran.ranks}
    ends = (
        Space([Region(f"{name}@{r}", (sum(given[r]),), r) for r in ran.ranks]),
        Space([Region(f"{name}@{r}", (sum(made[r]),), r) for r in ran.ranks]),
    )
    pairs = []
    for at, source in enumerate(ran.ranks):
        for to, target in enumerate(ran.ranks):
            n, expected = given[source][to], made[target][at]
            if n != expected:
                raise UndecidedError(
                    f"rank {source} sends {n} elements to rank {target}, which expects {expected}"
                )
            first, then = sum(given[source][:to]), sum(made[target][:at])
            regions = ends[0][f"{name}@{source}"], ends[1][f"{name}@{target}"]
            pairs.append((regions[0][first : first + n], regions[1][then : then + n]))
    return _moved("T", ran, *ends, pairs)


def _chunks(ran: Ran, rank: int, side: int) -> list[int]:
    """The elements to each rank (side 0), or from each rank (side 1)."""
    sizes = (ran.given, ran.made)[side].get(rank, ())
    n, total = len(ran.ranks), sum(sizes)
    if len(sizes) == n > 1:
        return list(sizes)
    splits = (ran.splits.get(rank) or ([], []))[side]
    if not splits:
        if total % n:
            raise UndecidedError(f"{total} elements of rank {rank} are no {n} equal parts")
        return [total // n] * n
    rows = sum(splits)
    if rows and total % rows:
        raise UndecidedError(f"{total} elements of rank {rank} are no {rows} rows")
    return [one * (total // rows if rows else 0) for one in splits]


def _scan(ran: Ran, name: str) -> LinearOperator:
    return _scanned(ran, name, 1)


def _exclusive_scan(ran: Ran, name: str) -> LinearOperator:
    return _scanned(ran, name, 0)


def _scanned(ran: Ran, name: str, own: int) -> LinearOperator:
    """The sums of what all ranks before give, and of the rank's own if it is 1."""
    given, made = (
        Space([Region(f"{name}@{r}", (size(r),), r) for r in ran.ranks if sizes.get(r)])
        for size, sizes in ((ran.all_given, ran.given), (ran.all_made, ran.made))
    )
    pairs = [
        (given[f"{name}@{source}"][:], made[f"{name}@{target}"][:])
        for at, target in enumerate(ran.ranks)
        if f"{name}@{target}" in made
        for source in ran.ranks[: at + own]
    ]
    if any(a.shape != b.shape for a, b in pairs):
        raise UndecidedError("tensors of the scan have other sizes on some ranks")
    return _moved("Scan", ran, given, made, pairs)


@records_origin
def _moved(
    symbol: str, ran: Ran, domain: Space, codomain: Space, pairs: list[tuple[Subset, Subset]]
) -> LinearOperator:
    if not pairs:
        return linop.zero(domain, codomain)
    made = out_of_place(domain, codomain, pairs)
    text = ranks_text(ran.ranks).partition(" ")[2].replace(" ", "")
    return NamedMovement(symbol, text, made.movement(), lambda: made)


_BUILDERS: dict[str, Callable[[Ran, str], LinearOperator]] = {
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
    "scan": _scan,
    "exclusive_scan": _exclusive_scan,
}
