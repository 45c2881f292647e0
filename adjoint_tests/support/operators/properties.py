"""Properties of every operator, as functions of an operator.

Each raises an AssertionError if the operator does not. Comparisons are exact, on whole numbers, but
for operators with arithmetic that rounds (a Fourier transform), whose tolerance is `rounding`.
Each has a test in which it must fail, in `test_helpers`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import scipy.sparse

import linop
from linop import LinearOperator, Space, Vector
from linop.backends import Backend
from linop.normal_form.stages import Stages
from linop.operators.algebra import DirectSum, Named
from linop.operators.expressions import Composition, Scaled, Sum
from linop.planning.collective_selection import Choice, selected
from linop.planning.lowering import lower_all, workers_of
from linop.planning.passes import Options, in_collectives, rewritten
from linop.planning.plan import LoweredPlan, Put, Send
from support.once import once

MOST = 9
"""Vectors hold whole numbers from -9 to 9."""


def limit(dtype: np.dtype[Any]) -> float:
    """Whole numbers up to here are exact in a dtype of floats."""
    return 2.0**8 if dtype.kind == "V" else 2.0 / float(np.finfo(dtype).eps)


def rounding(op: LinearOperator) -> float:
    """Bound on the rounding error of a result of size 1: transforms of a few hundred elements sum
    as many terms, in a tree of depth below 10. Nothing rounds in integers."""
    return 0.0 if op.dtype.kind in "iu" else 64 * float(np.finfo(op.dtype).eps)


@once(kept=8)
def matrix(stages: Stages) -> Any:
    """The matrix of a normal form, which several properties ask for. It is not to be changed."""
    return stages.to_matrix()


def dense(op: LinearOperator) -> np.ndarray:
    """The matrix of an operator in a dtype in which products with small vectors are exact; modulo
    2^bits for integers."""
    whole: np.ndarray = matrix(op.stages).toarray()
    if op.dtype.kind in "iu":
        return whole
    return whole.astype(np.complex128 if op.dtype.kind == "c" else np.float64)


def stays_exact(op: LinearOperator) -> bool:
    """True if no result for vectors of `MOST` leaves the whole numbers that the dtype holds, or
    if these are modulo 2^bits."""
    if op.dtype.kind in "iu":
        return True
    sizes = abs(dense(op))
    most = max(sizes.sum(axis=k).max(initial=0) for k in (0, 1))
    return bool(2 * MOST * most <= limit(op.dtype))


def same_arrays(given: np.ndarray, wanted: np.ndarray, tolerance: float = 0.0) -> None:
    """Two arrays are of equal shape and dtype, and equal in every element."""
    assert isinstance(given, np.ndarray), type(given)
    assert given.shape == wanted.shape, (given.shape, wanted.shape)
    assert given.dtype == wanted.dtype, (given.dtype, wanted.dtype)
    if tolerance and wanted.size:
        worst, size = np.abs(given - wanted).max(), np.abs(wanted).max()
        assert worst <= tolerance * max(1, size), (worst, size)
    else:
        assert (given == wanted).all(), (given, wanted)


def same_vectors(given: Vector, wanted: Vector, tolerance: float = 0.0) -> None:
    """Two whole vectors are equal."""
    assert given.space == wanted.space
    assert given.arrays.keys() == wanted.arrays.keys() == {r.name for r in wanted.space}
    for name in wanted.arrays:
        same_arrays(given[name], wanted[name], tolerance)


def same_matrices(given: Any, wanted: Any, tolerance: float = 0.0) -> None:
    """Two sparse matrices are of equal shape, and equal in every entry."""
    assert scipy.sparse.issparse(given)
    assert given.shape == wanted.shape, (given.shape, wanted.shape)
    difference = abs(given - wanted)
    worst = difference.max() if difference.nnz else 0
    assert worst <= tolerance, f"matrices differ by {worst}"


def same_stages(given: Stages, wanted: Stages, tolerance: float = 0.0) -> None:
    """Two normal forms are the same map; movements are compared as movements."""
    if given.pure and wanted.pure:
        assert given.movements[0] == wanted.movements[0]
    same_matrices(matrix(given), matrix(wanted), tolerance)


def two_roads(op: LinearOperator, tolerance: float = 0.0) -> None:
    """The adjoint by the rules of the expression is the adjoint by transposition."""
    assert op.H.domain == op.codomain
    assert op.H.codomain == op.domain
    assert op.H.shape == op.shape[::-1]
    assert op.H.H is op
    assert op.adjoint() is op.H
    same_stages(op.H.stages, op.stages.adjoint(), tolerance)
    same_matrices(matrix(op.H.stages), matrix(op.stages).conj().T, tolerance)


def written_out(op: LinearOperator) -> LinearOperator:
    """The same operator from primitives and local maps alone: names replaced by their bodies."""
    if isinstance(op, Named):
        return written_out(op.body)
    if isinstance(op, Composition):
        return linop.operators.expressions.compose(*map(written_out, op.factors))
    if isinstance(op, Sum):
        return Sum([written_out(term) for term in op.terms])
    if isinstance(op, Scaled):
        return Scaled(op.scalar, written_out(op.operand))
    if isinstance(op, DirectSum):
        return DirectSum([written_out(block) for block in op.blocks])
    return op


def known_is_composed(op: LinearOperator, tolerance: float = 0.0) -> None:
    """Named movements are those that the primitives make, one by one; and the adjoint by rules,
    from the primitives' adjoints, is that of the known movements."""
    plain = written_out(op)
    assert (plain.domain.regions, plain.codomain.regions) == (
        op.domain.regions,
        op.codomain.regions,
    )
    same_stages(op.stages, plain.stages, tolerance)
    same_stages(op.H.stages, plain.H.stages, tolerance)
    same_stages(written_out(op.H).stages, plain.stages.adjoint(), tolerance)


def untouched(apply: Callable[[Vector], Vector], x: Vector) -> Vector:
    """The result of applying something that must not change its argument, nor give it back."""
    before = x.copy()
    result = apply(x)
    same_vectors(x, before)
    held = list(x.arrays.values())
    for name, array in result.arrays.items():
        assert not any(np.shares_memory(array, other) for other in held), name
        held.append(array)
    return result


def product(op: LinearOperator, x: Vector) -> Vector:
    """The matrix of an operator times a vector: what applying it must give."""
    wide = dense(op)
    flat = wide @ op.domain.flatten(x, "regions").astype(wide.dtype)
    return op.codomain.unflatten(flat.astype(op.dtype), "regions")


def interpretation(op: LinearOperator, seed: int = 0, tolerance: float = 0.0) -> None:
    """Interpreting the expression is multiplying by the matrix, forward and back; and inner
    products agree exactly."""
    x, y = op.domain.integers(seed), op.codomain.integers(seed + 1)
    forward, backward = untouched(op, x), untouched(op.H, y)
    same_vectors(forward, product(op, x), tolerance)
    same_vectors(backward, product(op.H, y), tolerance)
    dot_products(forward, y, x, backward, tolerance)
    flat_products(op, x, forward)
    flat_products(op.H, y, backward)


def flat_products(op: LinearOperator, x: Vector, wanted: Vector) -> None:
    """`matvec` is the operator, in one order of flat vectors for it and its adjoint."""
    domain, codomain = op.flat_ends
    for one, other in zip(op.H.flat_ends, (codomain, domain), strict=True):
        assert (one.wholes, one.regions) == (other.wholes, other.regions)
    if domain == codomain:
        same_arrays(domain.positions(domain), codomain.positions(domain))
    same_arrays(op.matvec(domain.flatten(x)), codomain.flatten(wanted))


def dot_products(
    forward: Vector, y: Vector, x: Vector, backward: Vector, tolerance: float = 0.0
) -> None:
    """<F x, y> is <x, F* y> (paper, equation 13); modulo 2^bits for integers."""
    left, right = forward.inner(y), x.inner(backward)
    if y.space.dtype.kind in "iu":
        assert (int(left) - int(right)) % 2 ** (8 * y.space.dtype.itemsize) == 0, (left, right)
        return
    scale = max(forward.norm() * y.norm(), x.norm() * backward.norm(), 1)
    assert abs(left - right) <= tolerance * scale, (left, right)


Runs = tuple[dict[str, np.ndarray], dict[str, np.ndarray]]


def run_spmd(op: LinearOperator, x: Vector, y: Vector, backend: str = "threads") -> list[Runs]:
    """op(x) and op.H(y), as every worker of an SPMD program finds its part of them."""

    def main(backend: Backend) -> Runs:
        plan = op.compile(backend)
        mine = backend.vector(op.domain, x.arrays)
        other = backend.vector(op.codomain, y.arrays)
        return untouched(plan, mine).arrays, untouched(plan.H, other).arrays

    def untouched(plan: Any, held: Vector) -> Vector:
        before = {name: array.copy() for name, array in held.arrays.items()}
        result: Vector = plan(held)
        for name, array in held.arrays.items():
            same_arrays(array, before[name])
            assert not any(np.shares_memory(array, r) for r in result.arrays.values())
        return result

    needed = workers_of(op.stages)
    # A program that hangs is a failing one: the threads backend sees a deadlock by itself.
    return linop.launch(main, workers=needed[-1] + 1 if needed else 1, backend=backend)


def held(vector: Vector) -> dict[int, np.ndarray]:
    """The array of each worker that holds a region, for spaces with one region a worker."""
    return {w: vector[region.name] for region in vector.space for w in region.workers}


def whole_vector(space: Space, parts: list[Mapping[str, np.ndarray]]) -> Vector:
    """The vector that the workers' parts make up; all holders of a region must agree."""
    arrays: dict[str, np.ndarray] = {}
    for region in space:
        for worker in region.workers:
            array = parts[worker][region.name]
            same_arrays(array, arrays.setdefault(region.name, array))
    for worker, part in enumerate(parts):
        assert list(part) == [region.name for region in space.on(worker)]
    return Vector(space, arrays)


def backend_agrees(
    op: LinearOperator, backend: str = "threads", seed: int = 0, tolerance: float = 0.0
) -> None:
    """Running the plans of all workers gives what interpreting the expression gives."""
    x, y = op.domain.integers(seed), op.codomain.integers(seed + 1)
    results = run_spmd(op, x, y, backend)
    forward = whole_vector(op.codomain, [f for f, _ in results])
    backward = whole_vector(op.domain, [b for _, b in results])
    same_vectors(forward, op(x), tolerance)
    same_vectors(backward, op.H(y), tolerance)
    dot_products(forward, y, x, backward, tolerance)


def plans_of(op: LinearOperator) -> list[LoweredPlan]:
    """The plans of all workers of an operator."""
    return lower_all(op.stages)


def together(plans: Sequence[LoweredPlan]) -> list[LoweredPlan]:
    """Plans with all stages run by collectives that can be."""
    return [in_collectives(plan, COLLECTIVES) for plan in plans]


ALL = Choice(use=True, any_order=True)
MESSAGES = Options(small=0)
"""Executor in which no result is small."""
COLLECTIVES = Options(lambda plan: selected(plan, ALL), small=0)
"""The same, with every collective that there is."""


def after_passes(plans: Sequence[LoweredPlan], options: Options) -> list[list[LoweredPlan]]:
    """The plans of all workers after each pass over plans."""
    each = zip(*(rewritten(plan, options) for plan in plans), strict=True)
    return [[plan for _, plan in after] for after in each]


def forms(plans: Sequence[LoweredPlan]) -> list[list[LoweredPlan]]:
    """The plans of all workers as lowered and after every pass, with every collective that there is
    and without: those that differ."""
    found = [list(plans)]
    for options in MESSAGES, COLLECTIVES:
        for after in after_passes(plans, options):
            if after not in found:
                found.append(after)
    return found


def plans_fit(op: LinearOperator) -> None:
    """All `forms` of the plans of all workers are proven to be their operator, and send what `cost`
    says."""
    for direction in (op, op.H):
        plans = plans_of(direction)
        for form in forms(plans):
            linop.verify_plans(form, direction)
        cost = direction.cost()
        sends = {p.worker: [s for s in p.steps if isinstance(s, Send)] for p in plans}
        size = direction.dtype.itemsize
        assert sum(map(len, sends.values())) == cost.messages
        assert sum(s.size for sent in sends.values() for s in sent) * size == cost.bytes
        crossing = [s for p in plans for s in p.steps if isinstance(s, Put) and s.crosses]
        assert sum(s.target.size for s in crossing) * size == cost.bytes_between_memories
        for worker, sent in sends.items():
            traffic = cost.workers.get(worker)
            assert len(sent) == (traffic.messages_sent if traffic else 0)
            assert sum(s.size for s in sent) * size == (traffic.bytes_sent if traffic else 0)


def simplifies(op: LinearOperator, tolerance: float = 0.0) -> None:
    """Simplifying gives an equal operator, between the same spaces."""
    same = op @ linop.identity(op.domain)  # a law applies
    for simple in (op.simplify(), same.simplify()):
        for one, other in ((simple.domain, op.domain), (simple.codomain, op.codomain)):
            assert one == other and type(one) is type(other)
            same_arrays(one.positions(other), other.positions(other))
        same_stages(simple.stages, op.stages, tolerance)


def conjugates(op: LinearOperator, tolerance: float = 0.0) -> None:
    """The conjugate and the transpose have the conjugate and the transposed matrix."""
    whole = op.to_matrix()
    same_matrices(op.conj().to_matrix(), whole.conj(), tolerance)
    same_matrices(op.T.to_matrix(), whole.T, tolerance)
    assert op.shape == whole.shape == (op.codomain.size, op.domain.size)
    if op.dtype.kind in "iufc" and op.dtype.itemsize >= 4:
        assert whole.dtype == op.dtype


def prints(op: LinearOperator) -> None:
    """It has a text and a LaTeX form, with balanced brackets."""
    for text in (str(op), op._repr_latex_()):
        assert text
        for left, right in ("()", "{}", "[]"):
            assert text.count(left) == text.count(right), text
    assert " ".join(str(op).split()) in repr(op)  # which is one line
