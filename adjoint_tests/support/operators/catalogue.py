"""All operator factories that the generic tests run over: those for users, and one more."""

from __future__ import annotations

from linop import LinearOperator
from linop.testing import factories
from linop.testing.describing import Description
from linop.testing.factories import FACTORIES, Factory, build, describe, operator_factory, operators
from linop.testing.factories.collectives import halos, kernels
from support.once import once
from support.operators import pylops_factory

MODULES = (*factories.MODULES, pylops_factory)

NAMES = tuple(FACTORIES)
"""The names of all factories."""

__all__ = [
    "FACTORIES",
    "MODULES",
    "NAMES",
    "Factory",
    "build",
    "built",
    "describe",
    "halos",
    "kernels",
    "operator_factory",
    "operators",
]


@once(kept=2, key=lambda name, description: (name, repr(description)))
def built(name: str, description: Description) -> LinearOperator:
    """`build`, of one operator for all workers that are threads, with its normal forms."""
    op = build(name, description)
    for one in (op, op.H):
        assert one.stages is not None
    return op
