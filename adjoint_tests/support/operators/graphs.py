"""Random expressions in which nodes are used several times, and their matrices, node by node.

A graph is drawn as a short list of steps, each of which names earlier nodes; the operators, and
the matrices that they must have, are built of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

import linop
from linop import LinearOperator, Region, Space

X, Y = Region("x", 3, 0), Region("y", 3, 1)
SPACE = Space([X, Y])


class Step(NamedTuple):
    """One node: how it is made of two earlier ones and a leaf."""

    kind: str
    first: int
    second: int
    leaf: int


KINDS = ("left", "right", "sum", "difference", "product", "adjoint", "blocks", "steps")


def counted(calls: list[int]) -> LinearOperator:
    """A local operator on x, whose applications are counted."""
    matrix = np.array([[1.0, 2, 0], [0, 1, 0], [1, 0, -1]])

    def apply(x: Any, of: np.ndarray) -> Any:
        calls.append(1)
        return of @ x

    return linop.local(X, X, lambda x: apply(x, matrix), lambda y: apply(y, matrix.T))


def leaves(calls: list[int]) -> list[LinearOperator]:
    """Operators from `SPACE` to itself: movements, and one with a local operator."""
    local = linop.direct_sum(counted(calls), linop.identity(Space(Y)))
    return [
        linop.copy(SPACE, X[0:2], Y[1:3]),
        linop.add(SPACE, Y, X),
        linop.move(SPACE, X, Y),
        local,
        linop.identity(SPACE),
    ]


@st.composite
def graphs(draw: st.DrawFn, most: int = 10, kinds: Sequence[str] = KINDS) -> list[Step]:
    """Steps, the operands of which are mostly the latest nodes."""
    steps: list[Step] = []
    for k in range(draw(st.integers(1, most))):
        near = st.integers(max(0, k - 1), k + 1)
        step = Step(
            draw(st.sampled_from(kinds)),
            draw(near),
            draw(st.one_of(near, st.integers(0, k + 1))),
            draw(st.integers(0, 4)),
        )
        products = sum(one.kind == "product" for one in steps)
        steps.append(step._replace(kind="sum") if products > 2 else step)
    return steps


def nodes_of(steps: Sequence[Step], leaves: Sequence[LinearOperator]) -> list[LinearOperator]:
    """The nodes of a graph, the first two of which are leaves."""
    nodes = [leaves[0], leaves[3]]
    for kind, first, second, leaf in steps:
        a, b, own = nodes[first], nodes[second], leaves[leaf]
        nodes.append(_MADE[kind](a, b, own))
    return nodes


def _blocks(a: LinearOperator, b: LinearOperator, own: LinearOperator) -> LinearOperator:
    """A block-diagonal operator, one of whose blocks is shared, between a spread and a sum."""
    far = Space([Region("far x", 3, 0), Region("far y", 3, 1)])
    there = linop.operators.named_movement.out_of_place(
        SPACE, far, zip(SPACE.regions, far.regions, strict=True)
    )
    wide = linop.direct_sum(a, there @ own @ there.H)
    up = linop.vstack(linop.identity(SPACE), there)
    return up.H @ wide @ up - b


_MADE: dict[str, Callable[..., LinearOperator]] = {
    "left": lambda a, b, own: own @ a - b,
    "right": lambda a, b, own: a @ own - 2 * b,
    "sum": lambda a, b, own: a + b + own,
    "difference": lambda a, b, own: -a + b / 2,
    "product": lambda a, b, own: a @ b,
    "adjoint": lambda a, b, own: a.H + b,
    "blocks": _blocks,
    "steps": lambda a, b, own: linop.in_steps(own, a) + b,
}

_MATRIX: dict[str, Callable[..., np.ndarray]] = {
    "left": lambda a, b, own: own @ a - b,
    "right": lambda a, b, own: a @ own - 2 * b,
    "sum": lambda a, b, own: a + b + own,
    "difference": lambda a, b, own: -a + b / 2,
    "product": lambda a, b, own: a @ b,
    "adjoint": lambda a, b, own: a.T + b,
    "blocks": lambda a, b, own: a + own - b,
    "steps": lambda a, b, own: own @ a + b,
}


def matrix_of(steps: Sequence[Step]) -> np.ndarray:
    """The matrix of a graph's last node, by dense arithmetic on its nodes."""
    known = [leaf.to_matrix().toarray() for leaf in leaves([])]
    matrices = [known[0], known[3]]
    for kind, first, second, leaf in steps:
        matrices.append(_MATRIX[kind](matrices[first], matrices[second], known[leaf]))
    return matrices[-1]


def recurrence(S: LinearOperator, steps: int, right: bool = False) -> LinearOperator:
    """``u_, u = u, S @ u - u_``, or ``u @ S - u_``, from the identity and S."""
    before, now = linop.identity(S.domain), S
    for _ in range(steps):
        before, now = now, (now @ S if right else S @ now) - before
    return now
