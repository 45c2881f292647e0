"""Every operator of linop, as factories that generic tests run over.

A factory is registered by `operator_factory`, with the strategy of its descriptions. A new operator
is tested in every way the moment a factory for it stands in one of the modules named here, and
nobody has to remember.

    describe(name, workers)     a Hypothesis strategy of descriptions: small, plain, picklable data
    build(name, description)    the operator, the same in every process
    operators(name, workers)    a strategy of operators
"""

from linop.testing.factories import collectives, local, memory, padding, pipelines
from linop.testing.factories.registry import (
    FACTORIES,
    Factory,
    build,
    describe,
    operator_factory,
    operators,
)

MODULES = (memory, collectives, local, padding, pipelines)

__all__ = [
    "FACTORIES",
    "MODULES",
    "Factory",
    "build",
    "describe",
    "operator_factory",
    "operators",
]
