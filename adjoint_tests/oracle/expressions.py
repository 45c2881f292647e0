"""Shared expressions, simplification and direct sums, beside dense matrices of 64-bit integers."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
from scipy.linalg import block_diag

import linop
from linop import Region, Space, local_operators
from linop.errors import LinopError
from oracle.cases import Case, Drawer, want
from oracle.exactly import Array

LINES = 60
"""Lines of text that a person reads of an operator, at most; of 200 characters."""


def leaf(random: Random, S: Space, n: int, local: bool) -> tuple[Any, Array]:
    """An operator on a space of one region of n integers, and its matrix."""
    rng = np.random.default_rng(random.getrandbits(64))
    region = S.regions[0]
    kind = random.choice(["add", "clear", "copy", "move"] + ["matrix", "diagonal"] * local)
    one = np.eye(n, dtype=np.int64)
    if kind == "matrix":
        A = rng.integers(-2, 3, (n, n))
        return local_operators.matrix(A, S, S), A
    if kind == "diagonal":
        d = rng.integers(-2, 3, n)
        return local_operators.diagonal(d, S), np.diag(d)
    if kind == "clear":
        a = random.randrange(n)
        one[a, a] = 0
        return linop.clear(S, region[a : a + 1]), one
    a, b = random.sample(range(n), 2)
    source, target = region[a : a + 1], region[b : b + 1]
    if kind == "add":
        one[b, a] += 1
        return linop.add(S, source, target), one
    one[b] = one[a]
    if kind == "copy":
        return linop.copy(S, source, target), one
    one[a] = 0
    return linop.move(S, source, target), one


def graph(random: Random, S: Space, n: int, steps: int, local: bool) -> tuple[Any, Array]:
    """The last node of a graph in which each step uses earlier nodes, several times, and its
    matrix modulo 2^64."""
    leaves = [leaf(random, S, n, local) for _ in range(random.randint(1, 4))]
    nodes = [(linop.identity(S), np.eye(n, dtype=np.int64)), *leaves]
    with np.errstate(over="ignore"):
        for _ in range(steps):
            (A, a), (u, x), (v, y) = random.choice(leaves), nodes[-1], random.choice(nodes[-3:])
            kind = random.choice(["A u - v", "u + v", "A u", "u A", "2 u + v", "u + A v", "A.H u"])
            made: dict[str, Callable[[], tuple[Any, Array]]] = {
                "A u - v": lambda A=A, a=a, u=u, x=x, v=v, y=y: (A @ u - v, a @ x - y),
                "u + v": lambda u=u, x=x, v=v, y=y: (u + v, x + y),
                "A u": lambda A=A, a=a, u=u, x=x: (A @ u, a @ x),
                "u A": lambda A=A, a=a, u=u, x=x: (u @ A, x @ a),
                "2 u + v": lambda u=u, x=x, v=v, y=y: (2 * u + v, 2 * x + y),
                "u + A v": lambda A=A, a=a, u=u, x=x, v=v, y=y: (u + A @ v, x + a @ y),
                "A.H u": lambda A=A, a=a, u=u, x=x: (A.H @ u, a.T @ x),
            }
            nodes.append(made[kind]())
    return nodes[-1]


def draw_recurrence(random: Random) -> Case:
    n, steps = random.randint(2, 5), random.choice([5, 20, 40, 100, 300])
    local, form = random.random() < 0.5, random.choice(["graph", "recurrence", "doubling", "chain"])
    what = random.choice(["apply", "threads", "reference", "print", "simplify", "matrix", "send"])
    seed = random.getrandbits(32)

    def check() -> None:
        draw = Random(seed)
        S = Space([Region("x", (n,))], np.int64)
        rng = np.random.default_rng(seed)
        x = rng.integers(-9, 10, n)
        with np.errstate(over="ignore"):
            if form == "graph":
                op, M = graph(draw, S, n, steps, local)
            else:
                A, a = leaf(draw, S, n, local)
                op, M, before, last = A, a, linop.identity(S), np.eye(n, dtype=np.int64)
                for _ in range(steps):
                    if form == "recurrence":
                        before, op = op, A @ op - before
                        last, M = M, a @ M - last
                    elif form == "doubling":
                        op, M = op + op @ A, M + M @ a
                    else:
                        op, M = A @ op, a @ M
            forward, backward = M @ x, M.T @ x
        if what == "print":
            for text in (repr(op), str(op), op._repr_latex_(), repr(op.H)):
                want(len(text) <= 200 * LINES, f"{len(text)} characters")
        elif what == "matrix":
            want(np.array_equal(op.to_matrix().toarray(), M), "another matrix")
        else:
            run = op
            if what in ("threads", "reference"):
                run = op.compile(linop.backends.get(what))
            elif what == "simplify":
                run = op.simplify()
            elif what == "send":
                run = pickle.loads(pickle.dumps(op)) if steps % 40 else copy.deepcopy(op)
            want(np.array_equal(run(x), forward), f"forward {run(x)} for {forward}")
            want(np.array_equal(run.H(x), backward), f"adjoint {run.H(x)} for {backward}")

    kind = "with local maps" if local else "of movements"
    # What is multiplied from both sides may stand for a million uses: 2^20 are let through.
    seconds = 60 if form == "graph" else 20
    text = f"{what} of a {form} of {steps} steps {kind}, {n} numbers"
    return Case(22, text, check, seconds=seconds)


def draw_deep(random: Random) -> Case:
    steps = random.choice([1000, 3000, 10000])
    form = random.choice(["product", "sum", "alternating", "nested sums"])
    what = random.choice(["build", "print", "apply", "adjoint", "pickle", "simplify", "compile"])

    def check() -> None:
        S = Space([Region("x", (3,))], np.int64)
        A = linop.add(S, S.regions[0][:1], S.regions[0][1:2])
        one = op = linop.identity(S)
        for k in range(steps):
            if form == "product":
                op = A @ op
            elif form == "sum":
                op = op + A
            elif form == "nested sums":
                op = 1 * (op + one) if k % 2 else 1 * (op - one)
            else:
                op = A @ op - one if k % 2 else A @ op + one
        x = np.array([1, 0, 2])
        actions: dict[str, Callable[[], Any]] = {
            "build": lambda: op,
            "print": lambda: want(len(repr(op)) <= 200 * LINES, f"{len(repr(op))} characters"),
            "apply": lambda: op(x),
            "adjoint": lambda: op.H(x),
            "pickle": lambda: pickle.loads(pickle.dumps(op)),
            "simplify": op.simplify,
            "compile": lambda: op.compile(linop.backends.get("threads"))(x),
        }
        actions[what]()

    return Case(22, f"{what} of a {form} of depth {steps}", check, seconds=40)


def draw_word(random: Random) -> Case:
    """Allocations and deallocations of several regions at once: each region that is allocated
    and deallocated again disappears, and nothing else does."""
    kept = [Region(f"k{i}", (2,)) for i in range(random.randint(1, 4))]
    waiting = [Region(f"f{i}", (2,)) for i in range(random.randint(1, 4))]
    live, moves = list(kept), []
    for _ in range(random.randint(2, 8)):
        letter = "A" if waiting and (len(live) < 2 or random.random() < 0.5) else "D"
        some = waiting if letter == "A" else live[1:]  # one stays, so that no space is empty
        some = random.sample(some, random.randint(1, len(some))) if some else []
        if some:
            moves.append((letter, some))
            waiting = [r for r in waiting if r not in some]
            live = [r for r in live if r not in some] + (some if letter == "A" else [])
            random.shuffle(live)
    changed = {r.name for r in kept} ^ {r.name for r in live}

    def check() -> None:
        op: Any = linop.identity(Space(kept, np.int64))
        for letter, regions in moves:
            make = linop.allocate if letter == "A" else linop.deallocate
            op = make(op.codomain, *regions) @ op
        for long in (op, op.H):
            short = long.simplify()
            want(short.equals(long), "another operator")
            words = re.findall(r"[kf]\d+", str(short))
            want(sorted(words) == sorted(changed), f"{long} became {short}")
            want(str(short.simplify()) == str(short), "not idempotent")

    text = " ".join(f"{m}({','.join(r.name for r in rs)})" for m, rs in reversed(moves))
    return Case(23, text, check)


def draw_direct_sum(random: Random) -> Case:
    names = ["a", "b", "c", "t", "u"]
    what = random.choice(["direct_sum", "direct_sum", "nested", "hstack", "vstack"])
    chains: list[tuple[list[str], str]] = []
    for _ in range(random.randint(2, 4)):
        chain = [random.choice(names) for _ in range(random.randint(2, 4))]
        kind = random.choice(["moves", "local", "fan"])
        if kind == "fan":
            chain = random.sample(names, 3)
        if what in ("hstack", "vstack"):
            kind = "local" if kind == "fan" else kind
            end = -1 if what == "hstack" else 0
            chain[end] = chains[0][0][end] if chains else chain[end]
        chains.append((chain, kind))
    sides = [[chain[:1] for chain, _ in chains]] if what != "vstack" else []
    if what != "hstack":
        sides += [[chain[1:] if kind == "fan" else chain[-1:] for chain, kind in chains]]
    named = [[name for chain in side for name in chain] for side in sides]
    clash = any(len(set(side)) < len(side) for side in named)

    def check() -> None:
        rng = np.random.default_rng(7)
        made = [_chain(rng, *chain) for chain in chains]
        ops, matrices = [op for op, _ in made], [M for _, M in made]
        try:
            op = getattr(linop, what, linop.direct_sum)(*ops)
        except LinopError as error:
            want(clash, f"refused: {error}")
            raise
        stacks = {"hstack": np.hstack, "vstack": np.vstack}
        whole = stacks[what](matrices) if what in stacks else block_diag(*matrices)
        if what == "nested":
            op, whole = 2 * op, 2 * whole
        try:
            _is_matrix(op, whole, rng)
        except LinopError as error:
            want(False, f"built, and then {type(error).__name__}: {error}")

    text = f"{what} of " + ", ".join(f"{'->'.join(chain)} ({kind})" for chain, kind in chains)
    return Case(24, text, check)


def _chain(rng: np.random.Generator, names: list[str], kind: str) -> tuple[Any, Array]:
    """A product of operators from region to region, or of the first into both others (`fan`), and
    its matrix."""
    spaces = [Space([Region(name, (2,))], np.int64) for name in names]
    one = np.eye(2, dtype=np.int64)
    if kind == "fan":
        x = spaces[0].regions[0]
        op = linop.identity(spaces[0])
        for y in (Region(name, (2,)) for name in names[1:]):
            op = linop.copy(op.codomain, x, y) @ op
        return linop.deallocate(op.codomain, x) @ op, np.vstack([one, one])
    op, M = linop.identity(spaces[0]), one
    for X, Y in pairwise(spaces):
        if kind == "local" or X == Y:
            A = rng.integers(-3, 4, (2, 2))
            op, M = local_operators.matrix(A, X, Y) @ op, A @ M
        else:
            op = linop.move(X, X.regions[0], Y.regions[0]) @ op
    return op, M


def _is_matrix(op: Any, whole: Array, rng: np.random.Generator) -> None:
    """The operator applied, as a matrix, and as a plan."""
    x = {r.name: rng.integers(-9, 10, 2) for r in op.domain.regions}
    right = whole @ np.concatenate([x[r.name] for r in op.domain.regions])
    v = op.codomain.flatten(op(op.domain.vector(x)))
    want(np.array_equal(v, right), f"forward {v} for {right}")
    want(np.array_equal(op.to_matrix("regions").toarray(), whole), "another matrix")
    y = op.compile(linop.backends.get("threads"))(x if len(x) > 1 else next(iter(x.values())))
    y = np.concatenate([y[r.name] for r in op.codomain.regions]) if isinstance(y, dict) else y
    want(np.array_equal(y, right), f"plan {y} for {right}")


DRAWERS: dict[int, list[Drawer]] = {
    22: [draw_recurrence, draw_deep],
    23: [draw_word],
    24: [draw_direct_sum],
}
"""Drawers of cases, by kind."""
