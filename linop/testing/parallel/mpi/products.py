"""Large pairs of a forward function and its adjoint on the ranks of an MPI job: inner products of
whole numbers are compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise, product
from typing import Any

import numpy as np

import linop.backends
from linop.errors import UndecidableError
from linop.spaces.region import Region
from linop.spaces.space import Space
from linop.testing.checks import check_adjoint, check_dot_exact
from linop.testing.parallel.findings import groups_text
from linop.testing.parallel.mpi.functions import OWN, REPLICATED, Fault, Pair
from linop.testing.parallel.mpi.report import Trial
from linop.testing.parallel.twins.relations import Groups
from linop.testing.tested_maps.pairs import pair as tested_pair


def by_products(pair: Pair, groups: Sequence[Groups]) -> tuple[list[Trial], str]:
    """The pair between all spaces that are possible, the right ones first, and what was compared.
    Collective.

    Args:
        groups: partitions of the ranks over which arrays may be replicated.

    Raises:
        Fault: there are no such spaces.
    """
    backend = linop.backends.get("mpi", comm=pair.plain)
    found, evidence = [], "inner products of whole numbers, exactly"
    for before, after in _combinations_of_groups(pair, groups):
        spaces = []
        for side, one in enumerate((before, after)):
            owners = one or tuple((r,) for r in range(pair.world))
            regions = []
            for group in owners:
                shape = pair.sides[side][group[0]][0]
                if shape is not None:
                    name = f"{'xy'[side]}{'_'.join(map(str, group))}"
                    regions.append(Region(name, shape, group if one else group[0]))
            spaces.append(Space(regions, pair.sides[side][0][1]))
        forward, adjoint = (
            partial(_called, one, pair.comm) for one in (pair.parts.forward, pair.parts.adjoint)
        )
        tested = tested_pair(forward, adjoint, *spaces)
        try:
            report = check_dot_exact(tested, backend)
        except UndecidableError:
            report = check_adjoint(tested, backend)
            evidence = "inner products of random numbers, up to rounding"
        domain, codomain = (
            f"replicated over {groups_text(one, {})}" if one else "each rank's own"
            for one in (before, after)
        )
        said = "" if report else report.details
        found.append(Trial(domain, codomain, bool(report), -1, said))
    if not found:
        raise Fault("the ranks' arrays have different shapes, and cannot be replicated")
    found.sort(key=lambda one: not one.passed)
    return found, evidence


def _called(function: Any, comm: Any, x: Any) -> Any:
    return function(x, comm)


def _combinations_of_groups(
    pair: Pair, groups: Sequence[Groups]
) -> Iterator[tuple[Groups, Groups]]:
    sides = []
    used = _uses_all(pair)
    for side, stated in enumerate(pair.parts.forms):
        shapes = [shape for shape, _ in pair.sides[side]]
        each: list[Groups] = [] if stated == REPLICATED else [()]
        for one in groups if stated != OWN and (side or used) else ():
            if all(len({shapes[r] for r in group}) == 1 for group in one):
                each.append(one)
        sides.append(each)
    yield from product(sides[0], sides[1])


def _uses_all(pair: Pair) -> bool:
    """True if the forward looks at the arrays of all ranks."""
    sizes = pair.sizes(0)
    ends = np.cumsum([0, *sizes])
    numbers = np.random.default_rng(5).integers(1, 10, sum(sizes)).astype(float)
    for a, b in pairwise(ends):
        only = np.zeros(sum(sizes))
        only[a:b] = numbers[a:b]
        if b > a and not pair.apply(0, only).any():
            return False
    return True
