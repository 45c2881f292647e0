"""Differentiable maps between spaces, and the functions inside one worker's memory that they are
made of."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from linop.errors import ArgumentError, RegionError
from linop.networks.derivatives import CurrentPoint, FixedPoint, Point
from linop.normal_form.maps import LocalMap
from linop.operators.algebra import direct_sum, hstack
from linop.operators.expressions import Local
from linop.operators.operator import LinearOperator
from linop.operators.simplification import in_order
from linop.spaces.region import Region
from linop.spaces.scalars import Array
from linop.spaces.space import Space

Partial = Callable[[Point], LinearOperator]
"""The partial derivative with respect to one argument, at a point that is read when it is applied:
an operator from the argument's region to that of the value."""


class Map(ABC):
    """A differentiable map ``domain -> codomain`` between spaces of one dtype.

    ``F @ G`` is the composition with a map or an operator; `linop.networks.chain` composes any
    number of them. ``F(x)`` and ``F.jacobian(x)`` work in this process, for all workers; `compile`
    gives the program that workers run.

    Example:
        >>> X = linop.TensorSpace((2,), linop.Partition((1,)))
        >>> F, x = linop.networks.relu(X) @ (2 * linop.identity(X)), np.array([-1.0, 3.0])
        >>> F(x).tolist()
        [0.0, 6.0]
        >>> J = F.jacobian(x)  # an operator
        >>> J.H(np.ones(2)).tolist()
        [0.0, 2.0]
        >>> bool(linop.testing.check_adjoint(J))
        True
    """

    def __init__(self, domain: Space, codomain: Space) -> None:
        self.domain = domain
        self.codomain = codomain
        self._lock = threading.Lock()
        self._operators: dict[tuple[str, ...], tuple[LinearOperator, LinearOperator]] = {}

    @abstractmethod
    def evaluation(self, points: Points) -> LinearOperator:
        """The map, in the form of an operator that workers can run; each function puts down the
        point at which it is evaluated. It is not linear, and its adjoint has no meaning."""

    @abstractmethod
    def derivative(self, points: Points, active: Collection[str]) -> LinearOperator | None:
        """The Jacobian at the points, from the regions named by `active` to the regions of the
        codomain that depend on them; None if none does."""

    def __call__(self, x: Any) -> Any:
        """The value, computed in this process, which must hold all regions.

        Args:
            x: a `Vector` of the domain; or the bare array of its only region, or a dict of arrays
                by region name.

        Raises:
            RegionError, ShapeError, DTypeError: the argument is not in the domain.
        """
        return self.evaluation(Points(FixedPoint))(x)

    def jacobian(self, x: Any, wrt: Iterable[str | Region] | None = None) -> LinearOperator:
        """The derivative at a point: an operator.

        Args:
            x: the point, as for a call; it is copied.
            wrt: regions of the domain, or their names, with respect to which the derivative is
                taken; by default all. They are the domain of the result.

        Raises:
            RegionError, ShapeError, DTypeError: the argument is not in the domain, or there is no
                region of such a name.
        """
        names = self.wanted(wrt)
        points = Points(FixedPoint)
        self.evaluation(points)(x)
        return self.jacobian_at(points, names)

    def wanted(self, wrt: Iterable[str | Region] | None) -> list[str]:
        """Names of regions of the domain, checked; all for None."""
        regions = self.domain.regions if wrt is None else wrt
        names = [r.name if isinstance(r, Region) else r for r in regions]
        for name in names:
            if name not in self.domain:
                raise RegionError(
                    f"derivative with respect to {name!r}: the map's domain has no such region; it "
                    f"has {', '.join(r.name for r in self.domain.regions)}"
                )
        return names

    def jacobian_at(self, points: Points, names: Sequence[str]) -> LinearOperator:
        """The Jacobian at the points, from the named regions, in this order, to the codomain."""
        from linop.operators.algebra import zero
        from linop.operators.memory import allocate

        source = Space((self.domain[name] for name in names), self.domain.dtype)
        found = self.derivative(points, frozenset(names))
        if found is None:
            return zero(source, self.codomain)
        constant = [r for r in self.codomain.regions if r.name not in found.codomain]
        if constant:
            found = allocate(found.codomain, *constant) @ found
        return in_order(found, source, self.codomain)

    def compile(self, backend: Any, wrt: Iterable[str | Region] | None = None) -> Any:
        """The `Program` that runs this map and its gradient on a backend. Collective. Virtual
        workers that compile one map share the work of it: make it before `linop.launch`.

        Args:
            backend: from `linop.backends.get`, or given to the function that `linop.launch` runs.
            wrt: as for `jacobian`.

        Raises:
            RegionError: there is no region of such a name. ArgumentError: `backend` is no backend.
        """
        from linop.networks.program import Program

        names = tuple(self.wanted(wrt))
        if getattr(backend, "worker", None) is None:  # one program for all workers
            points = Points(FixedPoint)
            return Program(*self._at(points, names), backend, points.clear)
        with self._lock:  # once for all virtual workers, which are threads
            if names not in self._operators:
                self._operators[names] = self._at(Points(CurrentPoint), names)
        return Program(*self._operators[names], backend)

    def _at(self, points: Points, names: Sequence[str]) -> tuple[LinearOperator, LinearOperator]:
        return self.evaluation(points), self.jacobian_at(points, names)

    def __matmul__(self, other: Any) -> Map:
        from linop.networks.chain import chain

        return chain(other, self)


@dataclass(frozen=True, eq=False)
class Function:
    """A differentiable function inside one worker's memory, of arrays of some regions, with an
    array of one region as value.

    Args:
        domain: regions of the arguments, in order.
        codomain: the value's region alone.
        value: returns a newly allocated array, or a tuple of it and of arrays that the partial
            derivatives need at this point. It must not change its arguments.
        partials: for each argument, its partial derivative.
    """

    name: str
    domain: Space
    codomain: Space
    value: Callable[..., Any]
    partials: tuple[Partial, ...]

    def evaluation(self, point: Point) -> LinearOperator:
        """The function as an operator that remembers its point; see `Map.evaluation`."""
        names = [r.name for r in self.domain.regions]
        several = len(names) > 1

        def apart(*arrays: Array) -> Array:
            found = self.value(*arrays)
            values: tuple[Array, ...] = found if type(found) is tuple else (found,)
            point.put((*arrays, *values))
            return values[0]

        def forward(given: Any) -> Array:
            return apart(*(given[name] for name in names)) if several else apart(given)

        def backward(given: Any) -> Any:
            raise ArgumentError(f"{self.name} is not linear: take the adjoint of its Jacobian")

        spaces = self.domain, self.codomain
        return Local(LocalMap(*spaces, forward, backward, self.name, fresh=True, apart=apart))

    def derivative(self, point: Point, active: Collection[str]) -> LinearOperator | None:
        """The row of the partial derivatives with respect to the active arguments."""
        pairs = zip(self.domain.regions, self.partials, strict=True)
        blocks = [partial(point) for region, partial in pairs if region.name in active]
        return hstack(*blocks) if blocks else None


@dataclass
class Points:
    """The points of all functions of a map.

    Args:
        make: of a point for a function of this name.
    """

    make: Callable[[str], Point]
    found: dict[Function, Point] = field(default_factory=dict)
    parts: dict[int, Points] = field(default_factory=dict)

    def of(self, function: Function) -> Point:
        return self.found.setdefault(function, self.make(function.name))

    def part(self, k: int) -> Points:
        """The points of the k-th link of a chain, in which a map may stand several times."""
        return self.parts.setdefault(k, Points(self.make))

    def clear(self) -> None:
        """Forget the points."""
        for point in self.found.values():
            point.put(())
        for part in self.parts.values():
            part.clear()


class Parallel(Map):
    """Functions of several workers, each in its worker's memory; their regions are disjoint.

    Args:
        functions: of all workers.
        codomain: their values' regions, in the same order.
    """

    def __init__(self, functions: Sequence[Function], codomain: Space) -> None:
        self.functions = tuple(functions)
        regions = (r for f in functions for r in f.domain.regions)
        super().__init__(Space(regions, codomain.dtype), codomain)

    def evaluation(self, points: Points) -> LinearOperator:
        return direct_sum(*(f.evaluation(points.of(f)) for f in self.functions))

    def derivative(self, points: Points, active: Collection[str]) -> LinearOperator | None:
        blocks = [f.derivative(points.of(f), active) for f in self.functions]
        found = [block for block in blocks if block is not None]
        return direct_sum(*found) if found else None
