"""Walks over an expression as a graph: every node once, operands first, without recursion.

A subexpression that occurs several times is one node, by identity. Adjoints, conjugates, laws,
notation, code and normal forms are computed by rules of the classes of operators, which read the
results of the operands; the walks here call the rules in an order in which these are known. So no
depth of an expression meets Python's limit of recursion, and no sharing multiplies work. Spaces,
arrays and matrices do not belong here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import singledispatch
from typing import Any, Generic, TypeVar

from linop.caching import attributes

Node = Any
"""An operator: compared by identity."""
Operands = Callable[[Node], Iterable[Node]]
Result = TypeVar("Result")

MANY = 2**16
"""Largest number of factors or terms that a flattened product or sum lists; in a longer one (a
shared product may stand for exponentially many factors) nested ones stay nested."""


def operands(op: Node) -> Iterable[Node]:
    """The operators that an operator is built of."""
    own: Iterable[Node] = op._operands()
    return own


def postorder(
    root: Node,
    within: Operands = operands,
    known: Callable[[Node], bool] = lambda op: False,
    key: Callable[[Node], int] = id,
) -> list[Node]:
    """The nodes of an expression, each once, after its operands.

    Args:
        within: the operands of a node.
        known: nodes of which this is True are left out, with what is below them.
        key: equal for the same node.
    """
    found: list[Node] = []
    seen: set[int] = set()
    stack: list[tuple[Node, bool]] = [(root, False)]
    while stack:
        node, entered = stack.pop()
        if entered:
            found.append(node)
        elif key(node) not in seen and not known(node):
            seen.add(key(node))
            stack.append((node, True))
            stack.extend((operand, False) for operand in reversed(list(within(node))))
    return found


def uses(nodes: Iterable[Node], within: Operands = operands) -> dict[int, int]:
    """How many times each of some nodes is an operand of one of them, by id."""
    count: dict[int, int] = {}
    for node in nodes:
        for operand in within(node):
            count[id(operand)] = count.get(id(operand), 0) + 1
    return count


def depth_of(parts: Iterable[Node]) -> int:
    """The depth of an expression built of these."""
    return 1 + max((part.depth for part in parts), default=0)


def flattened(
    items: Sequence[Node], inner: Callable[[Node], Sequence[Node] | None]
) -> tuple[Node, ...]:
    """The items, in order, with each that has items of its own (`inner`) replaced by these."""
    found: list[Node] = []
    stack = list(reversed(items))
    while stack:
        item = stack.pop()
        within = inner(item)
        if within is None:
            found.append(item)
        else:
            stack.extend(reversed(within))
    return tuple(found)


class Rules(Generic[Result]):
    """A function of operators, given by one rule for each class, and evaluated once a node.

    A rule calls the function for the operands; these results are known by then. Classes of users
    may register rules. Results are kept with the nodes.

    Args:
        name: the attribute that keeps results; pickling leaves it out.
        default: the rule of classes without one.
    """

    def __init__(
        self,
        name: str,
        default: Callable[[Any], Result],
        within: Operands = operands,
    ) -> None:
        self._name = name
        self._rule = singledispatch(default)
        self._within = within
        self.register = self._rule.register

    def __call__(self, op: Node) -> Result:
        for node in postorder(op, self._within, lambda node: self._name in attributes(node)):
            attributes(node).setdefault(self._name, self._rule(node))
        result: Result = attributes(op)[self._name]
        return result
