"""Time loops of nonlinear steps, as differentiable maps of the initial state, of the parameters of
the step, and of signals. `linop.loops.program` runs them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

from linop.errors import ArgumentError, SpaceError
from linop.loops.checkpoints import Checkpoints, Every
from linop.loops.linear import series_of, wired
from linop.loops.over_time import beside, renaming, steps
from linop.networks.chain import chain
from linop.networks.maps import Map, Points
from linop.operators.algebra import identity
from linop.operators.expressions import compose
from linop.operators.memory import allocate, copies, deallocate
from linop.operators.operator import LinearOperator
from linop.spaces.region import Region, as_subset
from linop.spaces.space import Space


def evolution(
    step: Map | LinearOperator,
    n: int,
    sources: LinearOperator | None = None,
    receivers: LinearOperator | None = None,
    *,
    initial: bool | None = None,
    final: bool | None = None,
    checkpoints: Checkpoints | None = None,
) -> Evolution:
    """n steps x ← F(x, m) + S s_k, with records r_k = R x, for k = 0, 1, …, n - 1, as one
    differentiable map: of the initial state, of parameters m, which all steps share, and of
    signals. Record k is taken after step k.

    In this process, ``T(x)`` and ``T.jacobian(x)`` are those of the steps written out. ``compile``
    gives the program of a loop: the step and its Jacobian are compiled once, whatever n is, and
    the adjoint runs backwards, from checkpoints.

    Args:
        step: the map F. Regions of its codomain are the state, and regions of its domain too; the
            rest of its domain is m.
        n, sources, receivers, initial, final: as for `linop.timeloop`; by default the initial state
            is a part of the domain if there are no sources.
        checkpoints: which states are kept: `Every` (by default all, ``Every(1)``) or `Optimal`.

    Returns:
        A map, from the initial state, parameters and signals to the final state and records.

    Raises:
        ArgumentError: an argument is of another kind, or domain or codomain would be empty.
        SpaceError: a region of the step's codomain is not one of its domain; or as
            `linop.timeloop`. RegionError: two of state, parameters and signals (of state and
            records) have regions of one name.

    Example:
        >>> X, M = (linop.TensorSpace((1,), linop.Partition(1), name=name) for name in "xm")
        >>> T = linop.loops.evolution(linop.networks.multiply(X, M, name="x"), 3)
        >>> at = T.domain.vector({"x@0": np.array([2.0]), "m@0": np.array([3.0])})
        >>> T(at)["x@0"].tolist()  # 2 · 3³
        [54.0]
        >>> g = T.jacobian(at).H(X.vector(np.ones(1)))
        >>> g["x@0"].tolist(), g["m@0"].tolist()  # 3³ and 3 · 2 · 3²
        ([27.0], [54.0])
    """
    if not isinstance(step, Map | LinearOperator):
        raise ArgumentError(f"evolution, step: expected a map or an operator, given {step!r}")
    if not isinstance(checkpoints, Checkpoints | None):
        mend = "linop.loops.Every(k) or linop.loops.Optimal(states)"
        raise ArgumentError(f"evolution, checkpoints: {mend} expected, given {checkpoints!r}")
    F = step if isinstance(step, Map) else chain(step)
    for region in F.codomain:
        if region.name not in F.domain or F.domain[region.name] != region:
            raise SpaceError(
                f"evolution: the step must return a state like the one that it takes; it returns "
                f"{region}, and takes {', '.join(map(str, F.domain))}"
            )
    return Evolution(F, steps("evolution", n), sources, receivers, initial, final, checkpoints)


class Evolution(Map):
    """A time loop of a nonlinear step; see `evolution`.

    Attributes:
        body: the step with what comes in and goes out, (x, m, s_k) -> (x, r_k).
        state, parameters: the spaces of x and of m.
        coming, going: s and r over time.

    Example:
        >>> X, M = (linop.TensorSpace((1,), linop.Partition(1), name=name) for name in "xm")
        >>> T = linop.loops.evolution(linop.networks.multiply(X, M, name="x"), 3)
        >>> print(T.state, T.parameters, sep=" · ")
        x@0[1]@0 · m@0[1]@0
        >>> T.n, T.written_out.codomain == T.codomain
        (3, True)
    """

    def __init__(
        self,
        step: Map,
        n: int,
        sources: LinearOperator | None,
        receivers: LinearOperator | None,
        initial: bool | None,
        final: bool | None,
        checkpoints: Checkpoints | None,
    ) -> None:
        X = self.state = step.codomain
        rest = (region for region in step.domain if region.name not in X)
        self.parameters = Space(rest, X.dtype)
        self.n, self.checkpoints = n, checkpoints or Every(1)
        self.initial = sources is None if initial is None else initial
        self.final = receivers is None if final is None else final
        self.coming, self.going = series_of("evolution", n, sources, receivers, X)
        self.body = step
        if sources is not None or receivers is not None:
            before, after = wired(X, sources, receivers, self.coming, self.going)
            self.body = chain(step, compose(after, before))
        domain = [X] * self.initial + [self.parameters] * bool(len(self.parameters.regions))
        codomain = [X] * self.final + [self.going.space] * bool(self.going.names)
        domain += [self.coming.space] * bool(self.coming.names)
        if not domain or not codomain:
            side, what = ("domain", "sources") if not domain else ("codomain", "receivers")
            raise ArgumentError(f"evolution: its {side} would be empty; give {what}")
        super().__init__(*(beside("evolution", side) for side in (domain, codomain)))

    def evaluation(self, points: Points) -> LinearOperator:
        return self.written_out.evaluation(points)

    def derivative(self, points: Points, active: Collection[str]) -> LinearOperator | None:
        return self.written_out.derivative(points, active)

    def compile(self, backend: Any, wrt: Iterable[str | Region] | None = None) -> Any:
        """The `linop.loops.program.LoopProgram` that runs this map, and products with its Jacobian,
        on a backend, step by step. Collective. Arguments and errors: as `Map.compile`."""
        from linop.loops.program import LoopProgram

        return LoopProgram(self, backend, self.wanted(wrt))

    @property
    def written_out(self) -> Map:
        """The same map as a chain of n steps."""
        known: Map | None = getattr(self, "_written", None)
        if known is None:
            known = self._written = chain(*self._links())
        return known

    def _links(self) -> Iterator[Map | LinearOperator]:
        # Signals and records may have the names of the state where it is not beside them.
        if self.coming.names:
            yield self.coming.apart(self.n)
        if self.initial:
            yield identity(self.state)
        else:
            yield allocate(Space([], self.state.dtype), *self.state)
        if len(self.parameters.regions):
            yield _spread(self.parameters, self.n)
        for k in range(self.n):
            if len(self.parameters.regions):
                names = [region.name for region in self.parameters]
                yield renaming(_marked(self.parameters, k), names)
            if self.coming.names:
                yield renaming(self.coming.at(k), self.coming.names)
            yield self.body
            if self.going.names:
                yield renaming(self.going.at(), [region.name for region in self.going.at(k)])
        if not self.final:
            yield deallocate(self.state, *self.state)
        if self.going.names:
            yield self.going.apart(self.n).euclidean_adjoint


def _marked(space: Space, k: int) -> Space:
    """The regions of a space under other names for step k."""
    named = (Region(f"{r.name}·{k}", r.shape, r.workers, r.memory) for r in space)
    return Space(named, space.dtype)


def _spread(space: Space, n: int) -> LinearOperator:
    """The operator from a space to a copy of it for each of n steps."""
    if not n:
        return deallocate(space, *space)
    targets = [region for k in range(n) for region in _marked(space, k)]
    made = allocate(space, *targets)
    pairs = [as_subset(region) for _ in range(n) for region in space]
    filled = copies(made.codomain, pairs, [as_subset(region) for region in targets])
    return compose(deallocate(made.codomain, *space), filled, made)
