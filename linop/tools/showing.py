"""Texts of ``linop show``: a better order of the workers, plans, and plans after each pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import linop
from linop import LinearOperator
from linop.backends import Backend
from linop.backends.engine.arrays.interface import NUMPY
from linop.backends.engine.worker import Worker
from linop.planning.collective_selection import Choice, selected
from linop.planning.lowering import lower, workers_of
from linop.planning.passes import Options, shown
from linop.planning.patterns import spans
from linop.planning.placement import Placement
from linop.planning.plan import LoweredPlan
from linop.planning.prediction.rank_order import better_order, bytes_between

MOST, LARGEST = 64, 1 << 24
"""Workers of an operator whose instructions are shown, and elements of its arguments and results,
at most: they are made with their memory, on as many threads as the highest worker's number says."""


def in_blocks(op: LinearOperator, ranks_per_machine: int | None) -> Placement | None:
    """So many consecutive workers on each machine; None for no number."""
    if ranks_per_machine is None:
        return None
    return Placement.of_blocks(max(workers_of(op.stages), default=0) + 1, ranks_per_machine)


def predictions(
    op: LinearOperator, workers: int | None, ranks_per_machine: int | None
) -> Iterator[tuple[str, str]]:
    """(side, prediction) of the operator and of its adjoint.

    Args:
        workers: the number that was asked for; an operator of another number is said to have it.
    """
    many = len(workers_of(op.stages))
    other = "" if workers in (None, many) else f", which has {many} workers"
    placement = in_blocks(op, ranks_per_machine)
    for side, which in (("operator", op), ("adjoint", op.H)):
        yield side + other, str(linop.simulate(which, placement=placement))


def another_order(op: LinearOperator, placement: Placement) -> str:
    """The bytes that another order of the workers saves between machines, and that order."""
    better = better_order(op, placement)
    if better is placement:
        return "no order of the workers was found that sends fewer bytes between machines"
    workers = workers_of(op.stages)
    saved = bytes_between(op, placement) - bytes_between(op, better)
    names = [better.names[machine] for machine in better.machines]
    rows = [
        f"  {name}: {spans(tuple(w for w in workers if names[w] == name))}"
        for name in placement.names
    ]
    head = f"another order of the workers (a heuristic) saves {saved} bytes between machines:"
    return "\n".join([head, *rows])


def plans(op: LinearOperator, workers: Sequence[int], placement: Placement | None) -> Iterator[str]:
    """The plans of these workers, and the operator's predicted time."""
    for worker in workers:
        yield lower(op.stages, worker, placement).describe()
    yield f"predicted: {linop.simulate(op, placement=placement)}"


def passes(
    op: LinearOperator, workers: Sequence[int], placement: Placement | None
) -> Iterator[tuple[str, str]]:
    """(worker and step, plan after it) of every step of the pipeline, with collectives as they are
    selected for ranks without shared memory; at last the instructions, as Python, with messages
    among threads."""
    options = Options(lambda plan: selected(plan, Choice()), NUMPY.small)
    for worker in workers:
        before: LoweredPlan | None = None
        for what, plan in shown(op.stages, worker, options, placement):
            yield f"worker {worker}: {what}", "the same" if plan == before else plan.describe()
            before = plan
    threads = max(workers_of(op.stages), default=0) + 1
    what = "instructions, with messages among threads"
    if threads > MOST or op.domain.size + op.codomain.size > LARGEST:
        limits = f"of at most {MOST} workers, numbered from 0, and {LARGEST} elements"
        yield what, f"not shown: they are of operators {limits}"
        return
    texts = linop.launch(partial(_listing, op, placement), threads, "threads")
    yield from ((f"worker {worker}: {what}", texts[worker]) for worker in workers)


def written(
    op: LinearOperator, svg: Path | None, trace: Path | None, placement: Placement | None
) -> Iterator[Path]:
    """Write the operator's picture and its predicted timeline, and name the files that are given.

    Raises:
        ArgumentError: one cannot be written.
    """
    if svg is not None:
        op.draw().save(svg)
        yield svg
    if trace is not None:
        linop.planning.timeline(op, placement=placement).to_trace(trace)
        yield trace


def _listing(op: LinearOperator, placement: Placement | None, backend: Backend) -> str:
    """This worker's instructions."""
    assert isinstance(backend, Worker)
    plan = backend.compile(op)
    lowered = lower(op.stages, backend.worker, placement)
    return backend.program(lowered, workers_of(op.stages), plan.number, str).listing()
