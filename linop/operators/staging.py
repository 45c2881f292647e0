"""The normal form of an expression: each node once, however often it is used.

Nodes without local maps are movements, merged of those of their operands, as long as these do not
outgrow the expression (`linop.normal_form.merging`). What is left is spread into values
(`linop.operators.flow`), of which `linop.normal_form` makes stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from linop.graph import flattened, postorder, uses
from linop.normal_form.merging import Merged
from linop.normal_form.movement import Movement
from linop.normal_form.scheduling import stages_of_values
from linop.normal_form.stages import Stages
from linop.normal_form.values import TARGET, Values
from linop.operators.flow import Demand, Edge, Flow, flow_of

Op = Any
"""An operator; the classes of operators are above this module."""
FEW, USES = 2**14, 4
"""Most uses in a normal form: in all, or, if that is more, for each operand of the expression.
Programs use one once or twice; forms of far more, of what is shared on both sides, compile in
minutes."""


def stages_of(root: Op) -> Stages:
    """The normal form of an expression."""
    return Staging(root).stages()


class Staging:
    """The movements of the nodes of an expression, where these are merged."""

    def __init__(self, root: Op) -> None:
        self.root = root
        nodes = postorder(root, _operands)
        self._most = max(FEW, USES * sum(len(_operands(node)) for node in nodes))
        self._uses = uses(nodes, _operands)
        self._sharing = self._nodes_that_share(nodes)
        self._merged: dict[int, Merged | None] = {}
        self._pieces: dict[int, list[Any]] = {}
        self._sums: dict[int, Sequence[Op]] = {}
        self._apart: dict[int, Stages] = {}
        for node in postorder(root, self._within):
            if node.spreads:
                self._merged[id(node)] = node._merged(self)

    def stages(self) -> Stages:
        """The normal form of the root."""
        whole = self.merged(self.root)
        if whole is not None:
            return Stages((whole.movement,))
        if id(self.root) in self._apart:
            return self._apart[id(self.root)]
        flow = flow_of(self.root, self._spread_over, self._spread, self._most)
        values = Values(list(flow.spaces), set(flow.fixed))
        for edges in flow.incoming():
            for edge in edges:
                values.apply(self._step(flow, edge), edge.source, edge.target)
        return stages_of_values(values, postorder(TARGET, values.sources, key=int))

    def merged(self, op: Op) -> Merged | None:
        """The movement of a node; None if it has local maps, or is to run in several stages."""
        if id(op) not in self._merged:
            stages: Stages = op.stages
            self._merged[id(op)] = Merged.of(stages.movements[0]) if stages.pure else None
        return self._merged[id(op)]

    # Rules for the classes of operators

    def product(self, op: Op) -> Merged | None:
        """The product of the factors of an operator; runs of movements among them are merged, also
        where others are between them."""
        pieces: list[Any] = []
        for piece in self._powers(self._grouped(self._factors(op))):
            left = self.merged(piece) if not isinstance(piece, Merged) else piece
            both = None
            if left is not None and pieces and isinstance(pieces[-1], Merged):
                both = left.after(pieces[-1]).settled(several=False)
            if both is not None:
                pieces[-1] = both
            else:
                pieces.append(piece if left is None else left)
        self._pieces[id(op)] = pieces
        if len(pieces) > 1 or not isinstance(pieces[0], Merged):
            return None
        return pieces[0].settled(several=True) if self._is_shared(op) else pieces[0]

    def sum(self, op: Op) -> Merged | None:
        """The sum of the terms of an operator."""
        self._sums[id(op)] = self._terms(op)
        terms = [self.merged(term) for term in self._sums[id(op)]]
        given = [term for term in terms if term is not None]
        if len(given) < len(terms):
            return None
        return Merged.sum(given).settled(self._is_shared(op))

    def multiple(self, op: Op) -> Merged | None:
        """The multiple of the operand of an operator."""
        operand = self.merged(op.operand)
        if operand is None:
            return None
        return operand.scale(op.scalar).settled(self._is_shared(op))

    def apart(self, op: Op, stages: Stages) -> Merged | None:
        """An operator whose stages are known."""
        self._apart[id(op)] = stages
        return Merged.of(stages.movements[0]) if stages.pure else None

    def shares(self, op: Op) -> bool:
        """True if a node below is used several times in the whole expression."""
        return id(op) in self._sharing

    # Operands

    def _is_shared(self, op: Op) -> bool:
        return self._uses.get(id(op), 0) > 1

    def _nodes_that_share(self, nodes: Sequence[Op]) -> set[int]:
        found: set[int] = set()
        for node in nodes:
            if any(
                id(part) in found or (part.spreads and self._is_shared(part))
                for part in _operands(node)
            ):
                found.add(id(node))
        return found

    def _factors(self, op: Op) -> Sequence[Op]:
        """The factors of a product, first applied first; those of products that are used once
        among them."""

        def inner(part: Op) -> Sequence[Op] | None:
            factors: Sequence[Op] | None = None if self._is_shared(part) else part._opened(True)
            return factors

        return flattened(op._opened(True) or op._operands()[::-1], inner)

    def _terms(self, op: Op) -> Sequence[Op]:
        def inner(part: Op) -> Sequence[Op] | None:
            same = type(part) is type(op) and not self._is_shared(part)
            return part.parts if same else None

        return flattened(op._operands(), inner)

    def _within(self, op: Op) -> Iterable[Op]:
        if not _operands(op):
            return ()
        if op._opened(True) is not None:
            return self._factors(op)
        return self._terms(op) if hasattr(type(op), "terms") else op._operands()

    def _grouped(self, factors: Iterable[Op]) -> Iterable[Any]:
        """Factors, with each run of memory primitives as one movement."""
        for primitive, run in groupby(factors, lambda op: hasattr(op, "between")):
            if primitive:
                yield Merged.of(Movement.of_actions([op.between for op in run]))
            else:
                yield from run

    def _powers(self, factors: Iterable[Any]) -> Iterable[Any]:
        """Factors, with each run of one movement as one, if that is not better taken in stages."""
        for _, run in groupby(factors, key=id):
            factor, *more = run
            known = self.merged(factor) if more and not isinstance(factor, Merged) else None
            whole = None if known is None else known.power(1 + len(more))
            yield from (factor, *more) if whole is None else (whole,)

    # What is not merged

    def _spread_over(self, op: Op) -> Iterable[Op] | None:
        """The operands that a node is spread over; None if it is an edge."""
        known = not op.spreads or self.merged(op) is not None or id(op) in self._apart
        return None if known else self._within(op)

    def _spread(self, op: Op, flow: Flow, demand: Demand) -> None:
        if id(op) in self._sums:
            for term in self._sums[id(op)]:
                flow.apply(term, demand.source, demand.target, demand.scalar)
        elif id(op) in self._pieces:
            self._spread_product(op, flow, demand)
        else:
            op._spread(flow, demand)

    def _spread_product(self, op: Op, flow: Flow, demand: Demand) -> None:
        *first, last = self._pieces[id(op)]
        source = demand.source
        for piece in first:
            end = piece.movement if isinstance(piece, Merged) else piece
            middle = flow.wire(end.codomain)
            self._pass(flow, piece, Demand(source, middle, 1, 0))
            source = middle
        self._pass(flow, last, demand._replace(source=source))

    def _pass(self, flow: Flow, piece: Any, demand: Demand) -> None:
        put = flow.join if isinstance(piece, Merged) else flow.apply
        put(piece, demand.source, demand.target, demand.scalar)

    def _step(self, flow: Flow, edge: Edge) -> Stages | Merged:
        """The operator that an edge applies."""
        if edge.step is None:
            ends = flow.spaces[edge.source], flow.spaces[edge.target]
            found: Any = Merged.of(Movement.between(*ends))
        elif isinstance(edge.step, Merged):
            found = edge.step
        else:
            known = self.merged(edge.step) or self._apart.get(id(edge.step))
            found = known or edge.step.stages
        step: Stages | Merged = found if edge.scalar == 1 else found.scale(edge.scalar)
        return step


def _operands(op: Op) -> Sequence[Op]:
    """The operands of whose stages those of a node are made."""
    return op._operands() if op.spreads else ()
