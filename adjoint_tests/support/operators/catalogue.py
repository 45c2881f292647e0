"""All operator factories that the generic tests run over: those for users, and one more."""

from linop.testing import factories
from linop.testing.factories import FACTORIES, Factory, build, describe, operator_factory, operators
from linop.testing.factories.collectives import halos, kernels
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
    "describe",
    "halos",
    "kernels",
    "operator_factory",
    "operators",
]
