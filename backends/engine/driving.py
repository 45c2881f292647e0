"""Plans that call other plans: of time loops, which call the plan of one step again and again, and
of the products and sums that such loops stand in.

An operator without a loop never comes here: it has one plan. The operators of an expression with
loops are taken apart down to these, since the stages of a loop written out grow with its length.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any

from linop.backends.engine.arrays.lending import lender
from linop.backends.engine.base import Backend, BoundPlan
from linop.errors import BackendError, LinopError, SpaceError
from linop.loops.loop import Loop
from linop.loops.over_time import Series
from linop.normal_form.maps import bare_or_dict
from linop.operators.algebra import DirectSum, Named, Steps, restricted, total
from linop.operators.expressions import Composition, Identity, Scaled, Sum, compose
from linop.operators.operator import LinearOperator
from linop.spaces.region import Region
from linop.spaces.scalars import Array
from linop.spaces.space import Space

ByName = dict[str, Array]


def driving(op: LinearOperator, backend: Backend) -> BoundPlan:
    """The plan of an operator that has time loops. Collective.

    Raises:
        BackendError: as `Backend.compile`; or the workers' loops differ in length.
    """
    _agree(op, backend)
    plan = _plan(op, backend)
    if isinstance(plan, DrivingPlan) and (back := _weighted_adjoint(op)) is not None:
        plan.weighted = _plan(back, backend)
    return plan


def _weighted_adjoint(op: LinearOperator) -> LinearOperator | None:
    """The adjoint if it has Riesz maps, whose plans have to be agreed on when that of the operator
    is; None if it has none, or does not exist, since an inner product has no inverse."""
    try:
        back = op.H
    except SpaceError:
        return None
    return None if back is op.euclidean_adjoint else back


def _plan(op: LinearOperator, backend: Backend) -> BoundPlan:
    if not op.loops:
        return backend.compile(op)
    if isinstance(op, Loop):
        if not op.n:  # whose workers need not be those of the step
            return backend._compile(op)
        return LoopPlan(op, backend, backend.compile(op.body))
    if isinstance(op, Sum | DirectSum):
        return TotalPlan(op, backend, [_plan(term, backend) for term in _terms(op)])
    return SeriesPlan(op, backend, [_plan(factor, backend) for factor in _factors(op)])


def _factors(op: LinearOperator) -> list[LinearOperator]:
    """The factors of an operator, first applied first; those without loops that follow one another
    as one."""
    if isinstance(op, Scaled):
        return [op.operand, Scaled(op.scalar, Identity(op.codomain))]
    parts: Sequence[LinearOperator]
    if isinstance(op, Named):
        return [op.body]
    if isinstance(op, Composition | Steps):
        parts = op.factors[::-1]
    else:
        raise BackendError(f"compile: a time loop inside of {type(op).__name__}, {op!r}")
    if isinstance(op, Steps):
        return list(parts)
    groups = groupby(parts, lambda part: None if part.loops else True)
    found: list[LinearOperator] = []
    for without, group in groups:
        found += [compose(*reversed(list(group)))] if without else group
    return found


def _terms(op: Sum | DirectSum) -> list[LinearOperator]:
    """The terms of a sum, or of a direct sum; those without loops as one."""
    if isinstance(op, Sum):
        terms: Iterable[LinearOperator] = op.terms
    else:
        ends = op.domain, op.codomain
        terms = (
            compose(
                restricted(ends[1], b.codomain).euclidean_adjoint, b, restricted(ends[0], b.domain)
            )
            for b in op.blocks
        )
    terms = list(terms)
    plain = [term for term in terms if not term.loops]
    return [term for term in terms if term.loops] + ([total(plain)] if plain else [])


def _lengths(op: LinearOperator) -> list[tuple[int, bool]]:
    """The loops of an expression in the order in which they are compiled."""
    if isinstance(op, Loop):
        return [(op.n, op.backwards), *_lengths(op.body)]
    return [one for part in op._operands() if part.loops for one in _lengths(part)]


def _agree(op: LinearOperator, backend: Backend) -> None:
    """Check that the loops of all workers have one length. Collective."""
    together: Any = getattr(backend, "together", None)
    if together is None:
        return
    mine = repr(_lengths(op))
    _, said = together(lambda: (None, mine), "compile")
    for worker, theirs in enumerate(said):
        if theirs != said[0]:
            raise BackendError(
                f"workers built different time loops: (steps, backwards) are {said[0]} on worker "
                f"0, and {theirs} on worker {worker}. Build them from the same arguments on every "
                f"worker"
            )


class DrivingPlan(BoundPlan):
    """A plan that calls others. `start` checks the argument; the whole run is in `finish`, so that
    nothing overlaps what is between them.

    Args:
        parts: the plans that it calls.
    """

    def __init__(self, op: LinearOperator, backend: Backend, parts: Sequence[BoundPlan]) -> None:
        super().__init__(op, backend)
        self.parts = tuple(parts)
        self.number = parts[0].number
        self.weighted: BoundPlan | None = None
        """The plan of the adjoint, if that has Riesz maps."""
        self._running: tuple[ByName, ByName | None] = {}, None

    @property
    def is_broken(self) -> bool:
        return any(part.is_broken for part in self.parts)

    def _bind_adjoint(self, op: LinearOperator) -> BoundPlan:
        return self.weighted or self._plain_adjoint(op)

    @abstractmethod
    def _plain_adjoint(self, op: LinearOperator) -> BoundPlan:
        """The plan of the adjoint, if that is the Euclidean one."""

    def _begin(self, x: Any, out: Any) -> None:
        wrong: LinopError | None = None
        try:
            arrays = self._arguments(x)
            outs = self._outs(out, arrays)
        except LinopError as error:
            wrong = error
        self.parts[0].enter(wrong)
        into = None if out is None else _by_name(self._regions_out, outs)
        self._running = _by_name(self._regions_in, arrays), into

    def _end(self) -> Sequence[Array]:
        (arrays, outs), self._running = self._running, ({}, None)
        begun = time.perf_counter()
        found = self._driven(arrays, outs)
        self.counters.calls += 1
        self.counters.seconds += time.perf_counter() - begun
        return [found[region.name] for region in self._regions_out]

    @abstractmethod
    def _driven(self, arrays: ByName, outs: ByName | None) -> ByName:
        """The results for arguments, in `outs` if these are given."""

    def enter(self, wrong: LinopError | None) -> None:
        self.parts[0].enter(wrong)

    def fail(self, error: BaseException) -> None:
        for part in self.parts:
            part.fail(error)

    def meet(self, call: int) -> None:
        self.parts[0].meet(call)

    def _free(self) -> None:
        for part in self.parts:
            part.release()
        if self.weighted is not None:
            self.weighted.release()

    def describe(self) -> str:
        return "\n".join(part.describe() for part in self.parts)

    def _called(self, part: BoundPlan, arrays: ByName) -> ByName:
        """The results of a plan among `parts`."""
        y = part(_argument(part, arrays))
        regions = part._regions_out
        return y if isinstance(y, dict) else _by_name(regions, () if y is None else (y,))


class LoopPlan(DrivingPlan):
    """The plan of a time loop: the plan of its step, called for each step. States alternate between
    two sets of buffers, of which the step may overwrite the one that it reads; signals are read
    from, and records written to, the arrays over time."""

    op: Loop

    def __init__(self, op: Loop, backend: Backend, body: BoundPlan) -> None:
        super().__init__(op, backend, [body])
        self.body = body
        self._state = [region.name for region in self._held(op.state)]
        self._overwritten = body.give_up(self._state)
        self._buffers: list[ByName] | None = None
        self._lend = {region.name: self._lender(region) for region in self._regions_out}
        self._coming, self._going = (self._pairs(ends) for ends in (op.coming, op.going))
        self._inputs, self._outputs = (
            [region.name for region in side] for side in (body._regions_in, body._regions_out)
        )

    def _pairs(self, ends: Series) -> list[tuple[str, str]]:
        """Names of the regions over time that are held here, and those that the step has."""
        names = dict(zip((region.name for region in ends.space), ends.names, strict=True))
        return [(region.name, names[region.name]) for region in self._held(ends.space)]

    def _held(self, space: Space) -> Sequence[Region]:
        return space.regions if self._here is None else space.on(self._here)

    def _lender(self, region: Region) -> Callable[[], Array]:
        arrays = self.backend.arrays.of(region.memory)
        return lender(arrays, region.shape, self.op.dtype)

    def _plain_adjoint(self, op: LinearOperator) -> BoundPlan:
        back = self.body.op.euclidean_adjoint
        body = self.body.H if back is self.body.op.H else self.body._bind_adjoint(back)
        return LoopPlan(op, self.backend, body)  # type: ignore[arg-type]

    def describe(self) -> str:
        return f"{self.op.n} times:\n{self.body.describe()}"

    def _driven(self, arrays: ByName, outs: ByName | None) -> ByName:
        # Results of a step are written where they stay, so in plain memory.
        flag = self.backend.arrays.plain
        straight = outs if outs and all(getattr(a.flags, flag) for a in outs.values()) else None
        made = straight or {name: lend() for name, lend in self._lend.items()}
        before = self._first(arrays) if self.op.initial else self._zeros()
        left = self.op.n
        for k in self.op.times:
            left -= 1
            after = made if self.op.final and not left else self._other(left)
            given, into = dict(before), dict(after)
            for region, name in self._coming:
                given[name] = arrays[region][k]
            for region, name in self._going:
                into[name] = made[region][k]
            self.body.validated(
                [given[name] for name in self._inputs], [into[name] for name in self._outputs]
            )
            before = after
        return made if straight else _into(outs, made)

    def _first(self, arrays: ByName) -> ByName:
        """The initial state; what steps overwrite is copied, for arguments are not."""
        before = {name: arrays[name] for name in self._state}
        if not self._overwritten:
            return before
        own = self._other(self.op.n)
        for name in self._overwritten:
            own[name][...] = arrays[name]
            before[name] = own[name]
        return before

    def _zeros(self) -> ByName:
        zeros = self._other(self.op.n)
        for array in zeros.values():
            array[...] = 0
        return zeros

    def _other(self, left: int) -> ByName:
        """The buffers of the state that `left` steps follow."""
        if self._buffers is None:
            regions = self._held(self.op.state)
            self._buffers = [{r.name: self._lender(r)() for r in regions} for _ in range(2)]
        return self._buffers[left % 2]


class SeriesPlan(DrivingPlan):
    """The plan of a product: the plans of its factors, first applied first."""

    def _plain_adjoint(self, op: LinearOperator) -> BoundPlan:
        parts = [part.H for part in reversed(self.parts)]
        return SeriesPlan(op, self.backend, parts)

    def _driven(self, arrays: ByName, outs: ByName | None) -> ByName:
        for part in self.parts:
            arrays = self._called(part, arrays)
        return _into(outs, arrays)


class TotalPlan(DrivingPlan):
    """The plan of a sum: the plans of its terms."""

    def _plain_adjoint(self, op: LinearOperator) -> BoundPlan:
        return TotalPlan(op, self.backend, [part.H for part in self.parts])

    def _driven(self, arrays: ByName, outs: ByName | None) -> ByName:
        first, *others = self.parts
        found = self._called(first, arrays)
        for part in others:
            for name, array in self._called(part, arrays).items():
                found[name] += array
        return _into(outs, found)


def _into(outs: ByName | None, found: ByName) -> ByName:
    for name, array in (outs or {}).items():
        array[...] = found[name]
    return outs or found


def _argument(plan: BoundPlan, arrays: ByName) -> Any:
    regions = plan._regions_in
    return bare_or_dict(regions, [arrays[region.name] for region in regions])


def _by_name(regions: Sequence[Region], arrays: Sequence[Array]) -> ByName:
    return {region.name: array for region, array in zip(regions, arrays, strict=True)}
