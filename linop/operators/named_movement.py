"""Named operators whose movement is given: collectives, halo exchange, padding, offloading.

The composition of memory operators that such a name stands for is built lazily, by `out_of_place`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from linop.caching import cached_property
from linop.normal_form.matching import Link, Segment, matching
from linop.normal_form.movement import Movement
from linop.normal_form.stages import Stages
from linop.operators.algebra import Named
from linop.operators.expressions import compose
from linop.operators.memory import adds, allocate, deallocate
from linop.operators.operator import Arrays, LinearOperator, TensorOperator
from linop.spaces.region import Part, Region, Subset, as_subset
from linop.spaces.space import Space
from linop.spaces.tensor import TensorSpace

Pair = tuple[Part, Part]


class NamedMovement(Named):
    """A named operator whose movement is given, and whose body is built lazily: when it is
    expanded, simplified or interpreted. Tests compare the two for every collective.

    Args:
        name, subscript, starred: the symbol, as for `Named`.
        given: the normal form.
        build: returns the body, an operator with this normal form.
    """

    def __init__(
        self,
        name: str,
        subscript: str,
        given: Movement,
        build: Callable[[], LinearOperator],
        starred: bool = False,
    ) -> None:
        LinearOperator.__init__(self, given.domain, given.codomain)
        self.name = name
        self.subscript = subscript
        self.starred = starred
        self.given = given
        self._build = build

    @cached_property
    def body(self) -> LinearOperator:  # type: ignore[override]
        return self._build()

    spreads = False

    def _operands(self) -> Sequence[LinearOperator]:
        return ()

    def _opened(self, given: bool) -> Sequence[LinearOperator] | None:
        return None if given else (self.body,)

    def _adjoint(self) -> LinearOperator:
        back = self.given.adjoint()
        return NamedMovement(
            self.name, self.subscript, back, lambda: self.body.euclidean_adjoint, not self.starred
        )

    def _conj(self) -> LinearOperator:
        def build() -> LinearOperator:
            return self.body.conj()

        return NamedMovement(self.name, self.subscript, self.given.conj(), build, self.starred)

    def _interpret(self, arrays: Arrays) -> Arrays:
        return self.body._interpret(arrays)

    def _stages(self) -> Stages:
        return Stages((self.given,))


def collective(
    name: str,
    subscript: str,
    X: TensorSpace,
    Y: TensorSpace,
    links: Sequence[Link] = (),
    segments: Mapping[int, Sequence[Segment]] | None = None,
) -> TensorOperator:
    """The operator whose movement is ``matching(X, Y, links, segments)``, under a name. Its
    composition of memory operators (`out_of_place`) is built lazily."""
    given = matching(X, Y, links, segments)
    return NamedMovement(
        name, subscript, given, lambda: out_of_place(X, Y, [(t.source, t.target) for t in given])
    )


def out_of_place(domain: Space, codomain: Space, pairs: Iterable[Pair]) -> LinearOperator:
    """D_domain ΠS_{a→b} A_codomain: allocates the codomain's regions, adds each subset a of the
    domain to its subset b of the codomain, and deallocates the domain's regions.

    If the two spaces share a region's name, the new regions get primed names first, and are renamed
    by a move after the old ones are deallocated.
    """
    clash = any(region.name in domain for region in codomain.regions)
    fresh = {r.name: _primed(r, domain) if clash else r for r in codomain.regions}
    bring = allocate(domain, *fresh.values())
    factors = [bring]
    given = list(pairs)
    sources, targets = [as_subset(a) for a, _ in given], [as_subset(b) for _, b in given]
    if clash:
        targets = [Subset(fresh[b.region.name], b.start, b.stop) for b in targets]
    if given:
        factors.append(adds(bring.codomain, sources, targets))
    # Deallocations are written as adjoints of allocations, so that they end in `codomain` itself.
    if not clash:
        return compose(allocate(codomain, *domain.regions).euclidean_adjoint, *reversed(factors))
    dropped = deallocate(bring.codomain, *domain.regions)
    renamed = allocate(dropped.codomain, *codomain.regions)
    ends = [[as_subset(r) for r in regions] for regions in (fresh.values(), codomain.regions)]
    move = adds(renamed.codomain, *ends)
    end = allocate(codomain, *fresh.values()).euclidean_adjoint
    return compose(end, move, renamed, dropped, *reversed(factors))


def _primed(region: Region, space: Space) -> Region:
    name = region.name + "'"
    while name in space:
        name += "'"
    return Region(name, region.shape, region.workers, region.memory)
