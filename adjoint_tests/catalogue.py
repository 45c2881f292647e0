"""Every operator of linop, as a factory that the generic tests run over.

A factory is registered by `operator_factory`, with the strategy of its descriptions. A new operator
is tested in every way the moment a factory for it stands in one of the modules named here, and
nobody has to remember.

    describe(name, workers)     a Hypothesis strategy of descriptions: small, plain, picklable data
    build(name, description)    the operator, the same in every process
"""

import factories_collectives
import factories_local
import factories_memory
import factories_padding
from factories_collectives import halos, kernels
from registry import FACTORIES, Factory, build, describe, operator_factory, operators

MODULES = (factories_memory, factories_collectives, factories_local, factories_padding)

NAMES = tuple(FACTORIES)
"""The names of all factories."""

__all__ = [
    "FACTORIES",
    "MODULES",
    "NAMES",
    "Factory",
    "build",
    "describe",
    "halos",
    "kernels",
    "operator_factory",
    "operators",
]
