"""Maps one after another. The chain rule is here, and nowhere else."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from linop.errors import ArgumentError, RegionError, SpaceError
from linop.networks.maps import Map, Points
from linop.operators.algebra import identity, within
from linop.operators.memory import deallocate
from linop.operators.operator import LinearOperator
from linop.operators.simplification import in_order
from linop.spaces.region import Region
from linop.spaces.space import Space


def chain(*maps: Map | LinearOperator) -> Map:
    """Maps and operators, first applied first, each on the regions that it names.

    A map takes regions that earlier ones have made, or regions of the chain's domain, and puts the
    regions of its codomain in their place; all others are unchanged. So parameters are regions of
    the domain, in the order in which they are used. What two maps take has to be copied before.

    Raises:
        ArgumentError: an argument is neither a map nor an operator, or there is none.
        RegionError: a region is taken twice, or made where there is one of that name.
        SpaceError: dtypes differ.

    Example:
        >>> P = linop.Partition((1,))
        >>> X, W = linop.TensorSpace((1, 2), P, name="x"), linop.TensorSpace((2, 1), P, name="W")
        >>> F = linop.networks.linear(X, W)
        >>> net = linop.networks.chain(F, linop.networks.relu(F.codomain))
        >>> at = {"x@0": np.array([[1.0, 2.0]]), "W@0": np.array([[3.0], [1.0]])}
        >>> net(at).tolist()
        [[5.0]]
        >>> net.jacobian(at, wrt=["W@0"]).H(np.ones((1, 1))).tolist()  # the gradient, xᵀ
        [[1.0], [2.0]]
    """
    if not maps:
        raise ArgumentError("chain: expected at least one map")
    links: list[Map | LinearOperator] = []
    for each in maps:
        if not isinstance(each, Map | LinearOperator):
            raise ArgumentError(f"chain: expected maps and operators, given {each!r}")
        links += each.links if isinstance(each, Chain) else [each]
    return Chain(links)


class Chain(Map):
    """The composition of `links`, first applied first; see `chain`."""

    def __init__(self, links: Sequence[Map | LinearOperator]) -> None:
        self.links = tuple(links)
        dtypes = {link.domain.dtype.name for link in links}
        if len(dtypes) > 1:
            raise SpaceError(f"chain: maps of several dtypes: {', '.join(sorted(dtypes))}")
        given: dict[str, Region] = {}
        now: dict[str, Region] = {}
        gone: set[str] = set()
        for link in links:
            for region in link.domain.regions:
                if region.name in gone:
                    raise RegionError(
                        f"chain: {link} takes {region}, which an earlier map has taken; copy it "
                        f"first, to a region of another name for each"
                    )
                if region.name not in now:
                    given[region.name] = region
                elif now[region.name] != region:
                    raise RegionError(f"chain: {link} takes {region}; there is {now[region.name]}")
                now.pop(region.name, None)
                gone.add(region.name)
            for region in link.codomain.regions:
                if region.name in now:
                    raise RegionError(
                        f"chain: {link} makes {region}, and there is a region of that name; give "
                        f"one of them another name"
                    )
                now[region.name] = region
                gone.discard(region.name)
        dtype = links[0].domain.dtype
        super().__init__(Space(given.values(), dtype), Space(now.values(), dtype))

    def evaluation(self, points: Points) -> LinearOperator:
        whole = identity(self.domain)
        for k, link in enumerate(self.links):
            step = link if isinstance(link, LinearOperator) else link.evaluation(points.part(k))
            whole = within(step, whole.codomain) @ whole
        return in_order(whole, self.domain, self.codomain)

    def derivative(self, points: Points, active: Collection[str]) -> LinearOperator | None:
        # The product of the links' Jacobians, without what does not depend on active regions.
        domain = Space((r for r in self.domain.regions if r.name in active), self.domain.dtype)
        whole = identity(domain)
        for k, link in enumerate(self.links):
            if isinstance(link, LinearOperator):
                step = _of_some(link, whole.codomain)
            else:
                step = link.derivative(points.part(k), {r.name for r in whole.codomain.regions})
            if step is not None:
                whole = within(step, whole.codomain) @ whole
        return whole if whole.codomain.regions else None


def _of_some(op: LinearOperator, space: Space) -> LinearOperator | None:
    """An operator of those regions of its domain that a space has; the others are zero."""
    zeros = [r for r in op.domain.regions if r.name not in space]
    if len(zeros) == len(op.domain.regions):
        return None
    return op @ deallocate(op.domain, *zeros).euclidean_adjoint if zeros else op
