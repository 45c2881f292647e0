"""Programs of nonlinear time loops: the step's program, run again and again; its adjoint backwards,
from checkpoints. They compute with NumPy's arrays, as `linop.networks.Program` does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from linop.errors import ArgumentError, BackendError, LinopError, RegionError
from linop.loops.checkpoints import BACK, DROP, KEEP, LOAD, RUN, TURN, Action, Counts
from linop.loops.over_time import Series
from linop.normal_form.maps import bare_or_dict
from linop.spaces.region import Region
from linop.spaces.scalars import Array
from linop.spaces.space import Space
from linop.spaces.vector import Vector

if TYPE_CHECKING:
    from linop.loops.evolution import Evolution

ByName = dict[str, Array]
Pairs = list[tuple[str, str]]


class LoopProgram:
    """A time loop bound to a backend; `Evolution.compile` makes it. All methods are collective.

    Arguments and results are a `Vector`, or as of a plan: a bare array where a worker has one
    region, a dict of arrays by region name where it has several.

    Attributes:
        domain, codomain: of the map.
        active: the space of the arguments of derivatives.

    Example:
        >>> X, M = (linop.TensorSpace((1,), linop.Partition(1), name=name) for name in "xm")
        >>> T = linop.loops.evolution(linop.networks.multiply(X, M, name="x"), 3)
        >>> run = T.compile(linop.backends.get("threads"), wrt=M)  # derivatives by m
        >>> run({"x@0": np.array([2.0]), "m@0": np.array([3.0])}).tolist()
        [54.0]
        >>> run.vjp(np.array([1.0])).tolist()  # 3 · 2 · 3²
        [54.0]
        >>> run.counted == run.predicted
        True
    """

    def __init__(self, evolution: Evolution, backend: Any, active: Sequence[str]) -> None:
        self.evolution, self.backend = evolution, backend
        self.domain, self.codomain = evolution.domain, evolution.codomain
        self.active = self.domain
        if list(active) != [region.name for region in self.domain]:
            self.active = Space((self.domain[name] for name in active), self.domain.dtype)
        signals = [body for body, name in _pairs(evolution.coming) if name in active]
        shared = [region.name for region in evolution.parameters if region.name in active]
        body, state = evolution.body, [region.name for region in evolution.state]
        wrt = [*state, *shared, *signals]
        self._step = body.compile(backend, wrt)
        self._into, self._out_of = self._held(body.domain), self._held(body.codomain)
        self._wrt = self._held(Space((body.domain[name] for name in wrt), body.domain.dtype))
        self._state, self._parameters = (
            [region.name for region in self._held(space)]
            for space in (evolution.state, evolution.parameters)
        )
        self._coming, self._going = (
            _pairs(ends, self._held(ends.space)) for ends in (evolution.coming, evolution.going)
        )
        self._given: ByName | None = None
        self._now: ByName = {}
        self._kept: dict[int, ByName] = {}
        self._made: ByName = {}
        self._rest: Iterator[Action] | None = None
        self._most = self._ran = 0

    # Values and derivatives

    def __call__(self, x: Any) -> Any:
        """The value at x, whose arrays must not change before derivatives there are taken.

        Raises:
            ArgumentError, RegionError, ShapeError, DTypeError, SpaceError: x is not in the domain.
        """
        self._given = self._arrays(self.domain, x)
        self._most = self._ran = 0
        return self._wrapped(self.codomain, self._there(), x)

    def jvp(self, v: Any) -> Any:
        """J v, a vector of the codomain: the Jacobian where the map was last evaluated, times a
        vector of `active`. Every step runs again.

        Raises:
            BackendError: the map was not evaluated. Others: as a call.
        """
        arrays = self._arrays(self.active, v)
        self._restart()
        tangent = self._state_of(arrays, self.evolution.initial)
        shared = {name: arrays[name] for name in self._parameters if name in arrays}
        made = self._records()
        for k in range(self.evolution.n):
            self._run(k)
            given = self._at(k, shared | tangent, self._coming, arrays)
            found = self._by_name(self._out_of, self._step.jvp(self._bare(self._wrt, given)))
            tangent = {name: found[name] for name in self._state}
            for body, over in self._going:
                made[over][k] = found[body]
        self._rest = None
        return self._wrapped(self.codomain, self._value(tangent, made), v)

    def vjp(self, g: Any) -> Any:
        """Jᴴ g, a vector of `active`: the Jacobian's adjoint, times a vector of the codomain.
        Directly after the value it goes on from the checkpoints; at other times the loop runs anew
        before it.

        Raises: as `jvp`.
        """
        arrays = self._arrays(self.codomain, g)
        if self._rest is None:
            self._restart()
            self._there()
        assert self._rest is not None
        adjoint = self._state_of(arrays, self.evolution.final)
        sums = self._zeros(self._held(self.active))
        for action in self._rest:
            self._do(action)
            if action.kind == BACK:
                adjoint = self._back(action.step, arrays, adjoint, sums)
        self._rest = None
        if self.evolution.initial:
            sums |= {name: adjoint[name] for name in self._state if name in sums}
        return self._wrapped(self.active, sums, g)

    @property
    def jacobian(self) -> Linearized:
        """The Jacobian where the map was last evaluated, for solvers: a function of vectors, with
        an adjoint ``H``."""
        return Linearized(self.active, self.codomain, self.jvp, self.vjp, self.backend)

    # Costs

    @property
    def predicted(self) -> Counts:
        """The cost of one value and one gradient."""
        return self.evolution.checkpoints.predicted(self.evolution.n)

    @property
    def predicted_bytes(self) -> int:
        """The largest memory that kept states take here, in bytes."""
        elements = sum(region.size for region in self._held(self.evolution.state))
        return self.predicted.states * elements * self.domain.dtype.itemsize

    @property
    def counted(self) -> Counts:
        """The cost since the last value, which is included. After one gradient it is as predicted;
        further products with the Jacobian add their steps."""
        return Counts(self._most, self._ran, max(0, self._ran - self.evolution.n))

    # The loop

    def _restart(self) -> None:
        """Go to the initial state."""
        if self._given is None:
            raise BackendError(
                "the derivative of a time loop was applied before the loop was evaluated: call the "
                "program first"
            )
        self._kept, self._rest = {}, None
        self._now = self._state_of(self._given, self.evolution.initial)

    def _there(self) -> ByName:
        """Run the loop, and return its value; `_rest` has the actions of the adjoint."""
        self._restart()
        self._made = self._records()
        self._rest = self.evolution.checkpoints.actions(self.evolution.n)
        for action in self._rest:
            if action.kind == TURN:
                break
            self._do(action)
        made, self._made = self._made, {}
        return self._value(self._now, made)

    def _do(self, action: Action) -> None:
        kind, step, stop = action
        if kind == KEEP:
            self._kept[step] = self._now
            self._most = max(self._most, len(self._kept))
        elif kind == LOAD:
            self._now = self._kept[step]
        elif kind == DROP:
            del self._kept[step]
        elif kind == RUN:
            for k in range(step, stop):
                self._run(k)

    def _run(self, k: int) -> None:
        """Step k from the current state, at which its derivatives are taken from now on."""
        assert self._given is not None
        self._ran += 1
        shared = {name: self._given[name] for name in self._parameters}
        given = self._at(k, shared | self._now, self._coming, self._given)
        found = self._by_name(self._out_of, self._step(self._bare(self._into, given)))
        self._now = {name: found[name] for name in self._state}
        for body, over in self._going if self._made else ():
            self._made[over][k] = found[body]

    def _back(self, k: int, arrays: ByName, adjoint: ByName, sums: ByName) -> ByName:
        """The adjoint of step k, which ran last: adds to the sums, and returns the state's."""
        given = self._at(k, adjoint, self._going, arrays)
        found = self._by_name(self._wrt, self._step.vjp(self._bare(self._out_of, given)))
        for body, over in self._coming:
            if body in found:
                sums[over][k] = found[body]
        for name in self._parameters:
            if name in found:
                sums[name] += found[name]
        return {name: found[name] for name in self._state}

    # Arrays

    def _held(self, space: Space) -> Sequence[Region]:
        worker = self.backend.worker
        return space.regions if worker is None else space.on(worker)

    def _zeros(self, regions: Sequence[Region]) -> ByName:
        return {region.name: np.zeros(region.shape, self.domain.dtype) for region in regions}

    def _records(self) -> ByName:
        return self._zeros(self._held(self.evolution.going.space))

    def _state_of(self, arrays: ByName, whole: bool) -> ByName:
        """The state in a vector of one side of the map; zero unless it is `whole`."""
        given = arrays if whole else {}
        regions = self._held(self.evolution.state)
        zeros = self._zeros([region for region in regions if region.name not in given])
        return {name: given[name] if name in given else zeros[name] for name in self._state}

    def _value(self, state: ByName, made: ByName) -> ByName:
        """A vector of the codomain."""
        return state | made if self.evolution.final else made

    @staticmethod
    def _at(k: int, arrays: ByName, pairs: Pairs, over: ByName) -> ByName:
        """Arrays of a step: those given, and of arrays over time those of step k."""
        return arrays | {body: over[name][k] for body, name in pairs if name in over}

    @staticmethod
    def _bare(regions: Sequence[Region], arrays: ByName) -> Any:
        return bare_or_dict(regions, [arrays[region.name] for region in regions])

    @staticmethod
    def _by_name(regions: Sequence[Region], found: Any) -> ByName:
        if isinstance(found, dict):
            return found
        return {region.name: found for region in regions}

    def _arrays(self, space: Space, x: Any) -> ByName:
        """The arrays of an argument that are held here; an error is raised on every worker."""
        try:
            return self._checked(space, x)
        except LinopError as error:
            self._step.refuse(error)
            raise

    def _checked(self, space: Space, x: Any) -> ByName:
        regions = self._held(space)
        if isinstance(x, Vector):
            space.same_as(x.space, "argument of a time loop")
            x = x.arrays
        if not isinstance(x, Mapping):
            if len(regions) > 1 or (x is None) != (not regions):
                raise ArgumentError(
                    f"argument of a time loop: a dict of arrays of "
                    f"{', '.join(map(repr, (r.name for r in regions))) or 'no region'} expected, "
                    f"given {type(x).__name__}"
                )
            x = {region.name: x for region in regions}
        for region in regions:
            if region.name not in x:
                raise RegionError(f"argument of a time loop: no array for region {region.name!r}")
        return {region.name: space.check(region, x[region.name]) for region in regions}

    def _wrapped(self, space: Space, arrays: ByName, like: Any) -> Any:
        regions = self._held(space)
        if isinstance(like, Vector):
            return self.backend.vector(space, {r.name: arrays[r.name] for r in regions})
        return self._bare(regions, arrays)


class Linearized:
    """The Jacobian of a time loop at its last point, as a function of vectors.

    Attributes:
        domain, codomain, backend: as of a plan.
        H: its adjoint.
    """

    def __init__(
        self,
        domain: Space,
        codomain: Space,
        forward: Callable[[Any], Any],
        adjoint: Callable[[Any], Any],
        backend: Any,
    ) -> None:
        self.domain, self.codomain, self.backend = domain, codomain, backend
        self._pair = forward, adjoint

    def __call__(self, v: Any) -> Any:
        return self._pair[0](v)

    @property
    def H(self) -> Linearized:
        return Linearized(self.codomain, self.domain, *self._pair[::-1], self.backend)


def _pairs(ends: Series, regions: Sequence[Region] | None = None) -> Pairs:
    """For regions over time, by default all: the name that the step has, and their own."""
    names = dict(zip((region.name for region in ends.space), ends.names, strict=True))
    chosen = ends.space.regions if regions is None else regions
    return [(names[region.name], region.name) for region in chosen]
