"""The list of operator factories, and the decorator that enters one; see `catalogue`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import strategies as st

from linop import LinearOperator
from linop.testing.describing import Description


@dataclass(frozen=True)
class Factory:
    """How operators of one kind are described and built."""

    name: str
    describe: Callable[[int], st.SearchStrategy[Description]]
    """The strategy of descriptions for a number of workers."""
    build: Callable[..., LinearOperator]
    """The operator, from a description's items."""
    pure: bool
    """Whether it is movement alone."""
    exact: bool
    """Whether all of its arithmetic on whole numbers is exact."""


FACTORIES: dict[str, Factory] = {}


def operator_factory(
    describe: Callable[[int], st.SearchStrategy[Description]],
    *,
    pure: bool = True,
    exact: bool = True,
) -> Callable[[Callable[..., LinearOperator]], Callable[..., LinearOperator]]:
    """Register a function as the factory of the operators it builds, under its own name."""

    def register(build: Callable[..., LinearOperator]) -> Callable[..., LinearOperator]:
        name = build.__name__
        if name in FACTORIES:
            raise ValueError(f"two factories are called {name}")
        FACTORIES[name] = Factory(name, describe, build, pure, exact)
        return build

    return register


def describe(name: str, workers: int = 8) -> st.SearchStrategy[Description]:
    """Descriptions of operators of this kind, on workers 0 to workers - 1."""
    return FACTORIES[name].describe(workers)


def build(name: str, description: Description) -> LinearOperator:
    """The operator of a description."""
    return FACTORIES[name].build(**description)


def operators(name: str, workers: int = 8) -> st.SearchStrategy[LinearOperator]:
    """Operators of this kind."""
    return describe(name, workers).map(lambda description: build(name, description))
