"""Facts of a program that the search for faults begins with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from linop.testing.parallel.pairs.proofs import Pairs
from linop.testing.parallel.recording.records import Probe, Record
from linop.testing.parallel.twins.locations import Locations
from linop.testing.parallel.twins.parameters import Compared
from linop.testing.parallel.twins.relations import Groups, Kind, Relation


@dataclass
class Context:
    """Facts of a program.

    Attributes:
        names: of groups of ranks, the axes of the mesh.
        base: the factor by which gradients on the way of right parameters are larger than the
            twin's, since they are averaged later.
        references: by name, how right gradients are related to the twin's as backward passes leave
            them.
        broken: calls of `autograd.Function`s, by rank and number, whose backward is not the adjoint
            of their forward.
        suspect: those whose backward is not, between spaces that they may have.
        overall: the factor of all gradients, if they have one and the same.
        right: names of parameters whose gradients are the twin's.
        norms: by rank, of the twin's gradients of all that the rank holds.
        wanted: functions that would have to be looked at alone, to be sure.
    """

    ranks: dict[int, Record]
    twin: Record
    locations: Locations
    names: dict[Groups, str]
    broken: Pairs
    suspect: Pairs
    base: float = 1.0
    references: Mapping[str, Relation] = field(default_factory=dict)
    overall: float = 1.0
    right: tuple[str, ...] = ()
    norms: Mapping[int, float] = field(default_factory=dict)
    wanted: list[Probe] = field(default_factory=list)


def program_groups(ranks: Iterable[Record]) -> tuple[list[Groups], dict[Groups, str]]:
    """Partitions of all ranks that the program's collectives have, the most frequent first, and
    the names of those, and of others, that are axes of a mesh."""
    count: dict[tuple[int, ...], int] = {}
    titles: dict[tuple[int, ...], str] = {}
    ranks = list(ranks)
    for record in ranks:
        for one in record.collectives:
            group = tuple(sorted(one.ranks))
            if len(group) > 1:
                count[group] = count.get(group, 0) + 1
                titles.setdefault(group, one.group)
    everyone = sorted(record.rank for record in ranks)
    found: list[Groups] = []
    for group in sorted(count, key=lambda each: -count[each]):
        chosen, left = [group], set(everyone) - set(group)
        for other in sorted(each for each in count if len(each) == len(group)):
            if left.issuperset(other):
                chosen.append(other)
                left -= set(other)
        if not left and tuple(sorted(chosen)) not in found:
            found.append(tuple(sorted(chosen)))
    named: dict[str, set[tuple[int, ...]]] = {}
    for record in ranks:
        for group, name in record.axes.items():
            named.setdefault(name, set()).add(tuple(sorted(group)))
    names = {tuple(sorted(partition)): name for name, partition in named.items()
             if sorted(r for group in partition for r in group) == everyone}  # fmt: skip
    for partition in found:
        called = {titles.get(group, "") for group in partition} - {""}
        if len(called) == 1:
            names[partition] = called.pop()
    return found, names


def base(right: Iterable[Compared]) -> tuple[float, dict[str, Relation]]:
    """The factor of gradients as backward passes leave them, of parameters that are right in the
    end, and how those are related to the twin's, by name."""
    found = {one.name: one.left for one in right if one.left is not None}
    factors = [k for one in found.values() if (k := scaled(one))]
    return (max(set(factors), key=factors.count) if factors else 1.0), found


def overall(found: Sequence[Compared]) -> float:
    """The factor of all gradients, of several that are not zero; 1 if they have not one."""
    whole = [one.gradient for one in found if any(part.any() for part in one.expected.values())]
    if len(whole) < 2 or any(one.kind is not Kind.FACTOR or one.factors for one in whole):
        return 1.0
    k = whole[0].factor
    return k if all(abs(one.factor - k) < 1e-6 * abs(k) for one in whole) else 1.0


def scaled(relation: Relation) -> float | None:
    """The factor of a whole gradient or of a sum of terms; None of others."""
    if relation.kind is Kind.EQUAL:
        return 1.0
    if relation.kind in (Kind.FACTOR, Kind.UNSUMMED) and not relation.factors:
        return relation.factor
    return None
