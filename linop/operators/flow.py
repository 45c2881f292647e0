"""The flow of values through an expression: what is computed, from what, and how often.

A flow has wires, each with a space, and edges that apply an operator to the value of one wire and
add the result to another. An expression is spread over wires from its root down: a product puts a
wire between two factors, a sum sends one wire into all terms. A node that is to be applied to one
wire for the sake of several results is applied once, and its result is added to all; one that is
to be applied to several wires for one result is applied once, to their sum. The second is the
first, transposed: so the flow of an adjoint is as short as that of the operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np

from linop.errors import ArgumentError
from linop.graph import postorder
from linop.spaces.exact import Exact, rounded, wrapped
from linop.spaces.scalars import Array
from linop.spaces.space import Space

Arrays = dict[str, Array]
Value = TypeVar("Value")

MOST = 2**20
"""Largest number of uses: what is multiplied by several factors from both sides, or by itself, may
stand for exponentially many."""


class Edge(NamedTuple):
    """``target += scalar * step(source)``."""

    source: int
    target: int
    step: Any
    """An operator, or what else stands for one; None: the regions that both wires have."""
    scalar: Exact
    rank: int
    """Position among the edges into the target: sums are formed in this order."""


class Demand(NamedTuple):
    """One use of a node: ``target += scalar * node(source)``, of two wires."""

    source: int
    target: int
    scalar: Exact
    rank: int


@dataclass
class Flow:
    """Wires and edges; wire `SOURCE` has the argument, wire `TARGET` the result."""

    spaces: list[Space] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    fixed: set[int] = field(default_factory=set)
    """Wires whose values are made as such: no edges before and after them are joined."""
    most: int = MOST
    """Largest number of uses."""
    _demands: dict[int, list[Demand]] = field(default_factory=dict)
    _parts: dict[tuple[int, Space, bool], int] = field(default_factory=dict)
    _ranks: int = 0

    def wire(self, space: Space, fixed: bool = False) -> int:
        """A new wire."""
        self.spaces.append(space)
        if fixed:
            self.fixed.add(len(self.spaces) - 1)
        return len(self.spaces) - 1

    def part(self, wire: int, space: Space, into: bool = False) -> int:
        """The wire of some regions of another: read from it, or (`into`) added to it. One for all
        that ask for the same."""
        if self.spaces[wire] == space:
            return wire
        key = wire, space, into
        if key not in self._parts:
            part = self._parts[key] = self.wire(space)
            ends = (part, wire) if into else (wire, part)
            self._edge(self._demand(*ends, 1), None)
        return self._parts[key]

    def apply(self, step: Any, source: int, target: int, scalar: Exact = 1) -> None:
        """Demand an operator between two wires: it is spread, or becomes an edge, later."""
        demand = self._demand(source, target, scalar)
        self._demands.setdefault(id(step), []).append(demand)

    def join(self, step: Any, source: int, target: int, scalar: Exact = 1) -> None:
        """An edge between two wires."""
        self._edge(self._demand(source, target, scalar), step)

    def _demand(self, source: int, target: int, scalar: Exact) -> Demand:
        if self._ranks >= self.most:
            raise ArgumentError(
                f"the expression stands for more than {self.most} applications of its operators: "
                f"shared ones are multiplied from both sides, or by themselves, again and again. "
                f"Apply them one after another in a program, or, if the spaces are small, multiply "
                f"the matrices of those that are shared (to_matrix)"
            )
        self._ranks += 1
        return Demand(source, target, wrapped(scalar, self.spaces[TARGET].dtype), self._ranks)

    def _edge(self, demand: Demand, step: Any) -> None:
        self.edges.append(Edge(demand.source, demand.target, step, demand.scalar, demand.rank))

    def once(self, node: Any) -> Iterator[Demand]:
        """The demands for a node, brought together: as many as it has different sources, or
        targets, if these are fewer."""
        demands = self._demands.pop(id(node), [])
        sources, targets = {d.source for d in demands}, {d.target for d in demands}
        last = len(sources) > len(targets)
        groups: dict[int, list[Demand]] = {}
        for demand in demands:
            groups.setdefault(demand.target if last else demand.source, []).append(demand)
        for group in groups.values():
            yield group[0] if len(group) == 1 else self._together(node, group, last)

    def _together(self, node: Any, group: Sequence[Demand], last: bool) -> Demand:
        """One demand for several from one source; if `last`, to one target."""
        middle = self.wire(node.domain if last else node.codomain)
        for one in group:
            ends = (one.source, middle) if last else (middle, one.target)
            self._edge(Demand(*ends, one.scalar, one.rank), None)
        source, target, _, rank = group[0]
        return Demand(middle, target, 1, rank) if last else Demand(source, middle, 1, rank)

    def incoming(self) -> list[list[Edge]]:
        """The edges into each wire, in the order of sums."""
        found: list[list[Edge]] = [[] for _ in self.spaces]
        for edge in sorted(self.edges, key=lambda edge: edge.rank):
            found[edge.target].append(edge)
        return found


SOURCE, TARGET = 0, 1


def flow_of(
    root: Any,
    spread_over: Callable[[Any], Iterable[Any] | None],
    spread: Callable[[Any, Flow, Demand], None],
    most: int = MOST,
) -> Flow:
    """The flow of an expression.

    Args:
        spread_over: the operands that a node is spread over; None for nodes that are edges.
        spread: adds wires, and demands for these operands, as one demand for the node says.
        most: largest number of uses.

    Raises:
        ArgumentError: there are more.
    """
    flow = Flow(most=most)
    for space in (root.domain, root.codomain):
        flow.wire(space)
    flow.apply(root, SOURCE, TARGET)
    for node in reversed(postorder(root, lambda node: spread_over(node) or ())):
        opened = spread_over(node) is not None
        for demand in flow.once(node):
            if opened:
                spread(node, flow, demand)
            else:
                flow._edge(demand, node)
    return flow


def in_order(incoming: Sequence[Sequence[Edge]]) -> list[int]:
    """The wires of a flow, each after those that it is computed from, and TARGET last."""
    return postorder(TARGET, lambda wire: [e.source for e in incoming[wire]], key=int)


def evaluated(
    flow: Flow,
    given: Value,
    begun: Callable[[], Value],
    add: Callable[[Value, Edge, Value, bool], None],
    ended: Callable[[Value, Space], None],
) -> Value:
    """The value of TARGET for that of SOURCE. Values are released after their last use.

    Args:
        begun: a wire's value before anything is added.
        add: adds what an edge makes of the value of its source, which it may overwrite if the last
            argument is True.
        ended: called with a wire's value when all is added.
    """
    incoming = flow.incoming()
    left = [0] * len(flow.spaces)
    order = in_order(incoming)
    for wire in order:
        for edge in incoming[wire]:
            left[edge.source] += 1
    values = {SOURCE: given}
    for wire in order:
        total = values[wire] if wire == SOURCE else begun()
        for edge in incoming[wire]:
            left[edge.source] -= 1
            last = not left[edge.source]
            add(total, edge, values.pop(edge.source) if last else values[edge.source], last)
        ended(total, flow.spaces[wire])
        values[wire] = total
    return values[TARGET]


def interpreted(flow: Flow, arrays: Arrays, dtype: np.dtype[Any]) -> Arrays:
    """The values of TARGET for those of SOURCE, which may be overwritten: each edge is applied
    once, by the reference rule of its operator."""

    def add(total: Arrays, edge: Edge, given: Arrays, owned: bool) -> None:
        accumulate(total, applied(edge, given, owned, flow.spaces[edge.target], dtype))

    def ended(total: Arrays, space: Space) -> None:
        for region in space.regions:
            if region.name not in total:
                total[region.name] = np.zeros(region.shape, dtype)

    return evaluated(flow, arrays, dict[str, Array], add, ended)


def applied(edge: Edge, given: Arrays, owned: bool, target: Space, dtype: np.dtype[Any]) -> Arrays:
    """The term that an edge adds to its target; the arrays given are kept unless `owned`."""
    if edge.step is None:
        given = {name: given[name] for name in given if name in target}
    result = given if owned else {name: array.copy() for name, array in given.items()}
    if edge.step is not None:
        result = edge.step._interpret(result)
    if edge.scalar != 1:
        factor = rounded(edge.scalar, dtype)
        for array in result.values():
            np.multiply(array, factor, out=array)
    return result


def accumulate(total: Arrays, term: Arrays) -> None:
    """Add a term, which may become the total."""
    for name, array in term.items():
        if name in total:
            total[name] += array
        else:
            total[name] = array
