"""Factories of all operators of linop, over which generic tests run.

A factory is registered by `operator_factory`, with the strategy of its descriptions. A new operator
is covered by all generic tests as soon as a factory for it is in one of the modules imported here.

    describe(name, workers)     a Hypothesis strategy of descriptions: small, plain, picklable data
    build(name, description)    the operator, the same in every process
    operators(name, workers)    a strategy of operators
"""

from linop.testing.factories import (
    blocks,
    collectives,
    experts,
    fourier,
    local,
    loops,
    memory,
    padding,
    pipelines,
    real_linear,
    stencils,
)
from linop.testing.factories.registry import (
    FACTORIES,
    Factory,
    build,
    describe,
    operator_factory,
    operators,
)

MODULES = (
    memory,
    collectives,
    experts,
    local,
    fourier,
    padding,
    pipelines,
    blocks,
    stencils,
    real_linear,
    loops,
)

__all__ = [
    "FACTORIES",
    "MODULES",
    "Factory",
    "build",
    "describe",
    "operator_factory",
    "operators",
]
