"""All operator factories that the generic tests run over: those for users, and one more."""

import factories_pylops
from linop.testing import factories
from linop.testing.factories import FACTORIES, Factory, build, describe, operator_factory, operators
from linop.testing.factories.collectives import halos, kernels

MODULES = (*factories.MODULES, factories_pylops)

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
