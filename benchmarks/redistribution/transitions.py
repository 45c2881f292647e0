"""All transitions between placements of a tensor on a mesh of workers, in linop: their spaces, the
least that any method moves, and what linop's plans move.

A placement says, for each dimension of the mesh, which dimension of the tensor it splits (None: it
replicates), as torch's DTensor does: of a tensor of three dimensions on 2 × 2 × 2 workers there are
4³ = 64, with 64 · 63 = 4,032 transitions. Where several dimensions of the mesh split the same one,
the first is the outermost.
"""

from __future__ import annotations

import math
from itertools import permutations, product
from typing import NamedTuple

import numpy as np

import linop
from linop import REPLICATED, LinearOperator, Partition, TensorSpace

MESH = (2, 2, 2)
SHAPE = (8, 8, 8)
"""The least whose blocks are alike, of whatever placement."""
WORKERS = range(math.prod(MESH))
Placement = tuple[int | None, ...]

PLACEMENTS: list[Placement] = list(product((None, *range(len(SHAPE))), repeat=len(MESH)))
TRANSITIONS: list[tuple[Placement, Placement]] = list(permutations(PLACEMENTS, 2))


def space(placement: Placement) -> TensorSpace:
    """The tensor in blocks, as placed: mesh dimensions that split the same one are an axis of the
    partition's grid together."""
    split = sorted({d for d in placement if d is not None})
    groups = [[k for k, at in enumerate(placement) if at == d] for d in split]
    groups += [[k] for k, at in enumerate(placement) if at is None]
    mesh = np.arange(math.prod(MESH)).reshape(MESH)
    workers = mesh.transpose([k for group in groups for k in group]).ravel().tolist()
    grid = [math.prod(MESH[k] for k in group) for group in groups]
    axes = [*split, *[REPLICATED] * placement.count(None)]
    return TensorSpace(SHAPE, Partition(grid, workers), axes=axes)


def least(X: TensorSpace, Y: TensorSpace) -> int:
    """Elements that all workers together have to get: of its block of Y each needs what is not in
    its block of X, and no message holds an element for two workers."""
    total = 0
    for worker in WORKERS:
        pairs = zip(X.slices(worker), Y.slices(worker), strict=True)
        kept = [max(0, min(a.stop, b.stop) - max(a.start, b.start)) for a, b in pairs]
        total += math.prod(Y.local_shape(worker)) - math.prod(kept)
    return total


def moved(op: LinearOperator) -> int:
    """Elements that the messages of all workers' plans hold."""
    return op.cost().bytes // op.domain.dtype.itemsize


class Counts(NamedTuple):
    """Elements of a transition, and of its adjoint, which leads back: the least, and those of
    linop's plans."""

    least: int
    moved: int
    least_back: int
    moved_back: int


def counted(before: Placement, after: Placement) -> Counts:
    """The elements of a transition."""
    X, Y = space(before), space(after)
    op = linop.repartition(X, Y)
    return Counts(least(X, Y), moved(op), least(Y, X), moved(op.H))


def check(before: Placement, after: Placement) -> None:
    """Prove the plans of all workers, forward and adjoint, to be their operators, and compare the
    operator's blocks with those of the global array.

    Raises:
        AssertionError, linop.errors.PlanError: they are not.
    """
    X, Y = space(before), space(after)
    op = linop.repartition(X, Y)
    linop.verify_plans(op)
    linop.verify_plans(op.H)
    whole = np.arange(float(math.prod(SHAPE))).reshape(SHAPE)
    given, wanted = X.scatter(whole), Y.scatter(whole)
    assert op(given).equals(wanted) and op.H(wanted).equals(given), (before, after)


def run_on_threads(some: list[tuple[Placement, Placement]]) -> int:
    """Run transitions on eight threads, forward and adjoint, and compare each worker's blocks with
    those of the global array.

    Returns:
        Bytes that the workers have sent, by their own counters.

    Raises:
        AssertionError: a block differs.
    """
    whole = np.arange(float(math.prod(SHAPE))).reshape(SHAPE)

    def main(backend: linop.backends.Worker) -> int:
        worker = backend.worker
        for before, after in some:
            X, Y = space(before), space(after)
            with linop.repartition(X, Y).compile(backend) as plan:
                y = plan(whole[X.slices(worker)].copy())
                assert (y == whole[Y.slices(worker)]).all(), (before, after)
                assert (plan.H(y) == whole[X.slices(worker)]).all(), (before, after)
        return sum(row.bytes for row in backend.counters())

    return sum(linop.launch(main, len(WORKERS), backend="threads"))


def text(placement: Placement) -> str:
    """As DTensor prints it: "S(0), R, S(2)"."""
    return ", ".join("R" if at is None else f"S({at})" for at in placement)
