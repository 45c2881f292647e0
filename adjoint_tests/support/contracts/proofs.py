"""The contract of bound plans: what the emitters of all workers get computes the operator, whatever
the order in which workers go on. This module must not import MPI when it is imported."""

from __future__ import annotations

from typing import Any

from linop.backends import Backend
from linop.normal_form.stages import Stages
from linop.operators.operator import LinearOperator
from linop.testing.describing import Description
from support.contracts.plans import argument
from support.operators.catalogue import built
from support.planning.exported import Exported, exported
from support.planning.machine import prove


def programs(backend: Backend, op: LinearOperator, seed: int) -> list[tuple[Stages, Exported]]:
    """This worker's programs of an operator and its adjoint, with their stages."""
    plan, found = op.compile(backend), []
    for one in (plan, plan.H):
        one(argument(one, seed))  # binds it
        found.append((one.op.stages, exported(one._program, one.op.stages)))  # type: ignore[attr-defined]
    return found


def proven_on_ranks(backend: Any, name: str, description: Description, seed: int) -> None:
    """Rank 0 proves all ranks' programs of an operator of the catalogue."""
    mine = programs(backend, built(name, description), seed)
    everybodys = backend.transport.comm.gather([one for _, one in mine])
    if everybodys is not None:
        for (stages, _), each in zip(mine, zip(*everybodys, strict=True), strict=True):
            prove(each, stages, seed=seed)
