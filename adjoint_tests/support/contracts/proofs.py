"""The contract of bound plans: what the emitters of all workers get computes the operator, whatever
the order in which workers go on. This module must not import MPI when it is imported."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from linop.backends import Backend
from linop.backends.engine.execution.instructions import Instruction, Interaction
from linop.normal_form.stages import Stages
from linop.operators.operator import LinearOperator
from linop.testing.describing import Description
from support.contracts.plans import OPERATORS, argument, arrays_of, leaves, result
from support.operators.catalogue import built
from support.operators.properties import same_arrays
from support.planning.broken_programs import FATAL, mutants
from support.planning.exported import Exported, exported
from support.planning.instructions import interpreted
from support.planning.machine import Wrong, prove

FAULTY = sorted(
    name for name in OPERATORS if not any(word in name for word in ("large", "shares", "parts"))
)
"""Not parts: adding to zeros, instead of setting, is no fault."""
CALLS = 3
"""In which a change of instructions is looked at."""


def programs(backend: Backend, op: LinearOperator, seed: int) -> list[tuple[Stages, Exported]]:
    """This worker's programs of an operator and its adjoint, with their stages."""
    plan, found = op.compile(backend), []
    for one in (*leaves(plan), *leaves(plan.H)):
        one(argument(one, seed))  # binds it
        found.append((one.op.stages, exported(one._program, one.op.stages)))  # type: ignore[attr-defined]
    return found


def faults(each: Sequence[Exported], stages: Stages, seed: int, many: int = 8) -> Counter[str]:
    """Of some programs with a fault, drawn: kinds of those that are accepted."""
    index = {program.worker: k for k, program in enumerate(each)}
    every = [one for program in each for one in mutants(program, len(each))]
    accepted: Counter[str] = Counter()
    for kind, other in random.Random(seed).sample(every, min(many, len(every))):
        wrong = [*each]
        wrong[index[other.worker]] = other
        try:
            prove(wrong, stages, seed=seed)
        except Wrong:
            continue
        accepted[kind] += 1
    return accepted


def faults_are_caught(each: Sequence[Exported], stages: Stages, seed: int) -> None:
    """Programs that compute something else are not accepted."""
    accepted = faults(each, stages, seed)
    assert not accepted.keys() & set(FATAL), accepted


def caught_on_ranks(backend: Any, name: str, seed: int) -> None:
    """`faults_are_caught` of all ranks' programs of an operator of `FAULTY`."""
    mine = programs(backend, OPERATORS[name](backend.transport.workers), seed)
    everybodys = backend.transport.comm.gather([one for _, one in mine])
    if everybodys is not None:
        for (stages, _), each in zip(mine, zip(*everybodys, strict=True), strict=True):
            faults_are_caught(each, stages, seed)


Changed = Callable[[list[Instruction]], list[Instruction]]


def runs_as_changed(
    backend: Any, op: LinearOperator, seed: int, changed: Changed, programs: list[Exported]
) -> None:
    """This worker's program after a change of its instructions, added to `programs`; executed,
    which raises an error unless its results are right."""
    plan: Any = op.compile(backend)
    plan(argument(plan, seed))
    program = plan._program
    program.instructions = changed(
        [
            replace(one, operations=[each])
            for one in program.instructions
            for each in one.operations
            if type(each)
            is not Interaction  # the numbers of calls, which a change would be told by
        ]
    )
    programs.append(exported(program, op.stages))
    backend.transport.gather_all(None)  # all are exported
    for k in range(CALLS):
        x, wanted = argument(plan, seed + k), result(plan, seed + k)
        given = interpreted(program, plan._arguments(x))
        for mine, right in zip(given, arrays_of(wanted), strict=True):
            same_arrays(mine, right)


def proven_on_ranks(backend: Any, name: str, description: Description, seed: int) -> None:
    """Rank 0 proves all ranks' programs of an operator of the catalogue."""
    mine = programs(backend, built(name, description), seed)
    everybodys = backend.transport.comm.gather([one for _, one in mine])
    if everybodys is not None:
        for (stages, _), each in zip(mine, zip(*everybodys, strict=True), strict=True):
            prove(each, stages, seed=seed)
