"""The contract of the emitter: a plan's calls do what its instructions say. This module must not
import MPI when it is imported."""

from __future__ import annotations

from linop.backends import Backend
from linop.testing.describing import Description
from support.contracts.plans import argument, arrays_of, leaves, result
from support.operators.catalogue import FACTORIES, built
from support.operators.properties import rounding, same_arrays
from support.planning.instructions import interpreted

CALLS = 5
"""Of each plan: by the emitter and the interpreter in turn, who keep count together."""


def calls_do_what_instructions_say(
    backend: Backend, name: str, description: Description, seed: int
) -> None:
    """An operator of the catalogue, forward and back."""
    op = built(name, description)
    tolerance = 0.0 if FACTORIES[name].exact else rounding(op)
    plan = op.compile(backend)
    for one in (*leaves(plan), *leaves(plan.H)):
        for k in range(CALLS):
            x, wanted = argument(one, seed + k), result(one, seed + k)
            if k % 2 == 0:  # the first call binds
                given = arrays_of(one(x))
            else:
                given = interpreted(one._program, one._arguments(x))  # type: ignore[attr-defined]
            for mine, right in zip(given, arrays_of(wanted), strict=True):
                same_arrays(mine, right, tolerance)
