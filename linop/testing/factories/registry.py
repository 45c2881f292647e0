"""The registry of operator factories, its decorator, and access by name. The factories themselves
are in the other modules of this package."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import strategies as st

from linop import LinearOperator
from linop.testing.describing import Description


@dataclass(frozen=True)
class Factory:
    """A factory of operators of one kind: the strategy of their descriptions, and the function that
    builds one."""

    name: str
    describe: Callable[[int], st.SearchStrategy[Description]]
    """The strategy of descriptions for a number of workers."""
    build: Callable[..., LinearOperator]
    """Builds the operator, from a description's items as keyword arguments."""
    pure: bool
    """True if the operators are data movement alone, without local operators."""
    exact: bool
    """True if the operators' arithmetic on small whole numbers does not round."""


FACTORIES: dict[str, Factory] = {}


def operator_factory(
    describe: Callable[[int], st.SearchStrategy[Description]],
    *,
    pure: bool = True,
    exact: bool = True,
) -> Callable[[Callable[..., LinearOperator]], Callable[..., LinearOperator]]:
    """Decorator that registers a function as a factory, under its own name.

    Args:
        describe: returns the strategy of descriptions for a number of workers.
        pure, exact: see `Factory`.

    Raises:
        ValueError: the name is taken.
    """

    def register(build: Callable[..., LinearOperator]) -> Callable[..., LinearOperator]:
        name = build.__name__
        if name in FACTORIES:
            raise ValueError(f"two factories are called {name}")
        FACTORIES[name] = Factory(name, describe, build, pure, exact)
        return build

    return register


def describe(name: str, workers: int = 8) -> st.SearchStrategy[Description]:
    """The strategy of descriptions of a factory, on workers 0 to ``workers - 1``."""
    return FACTORIES[name].describe(workers)


def build(name: str, description: Description) -> LinearOperator:
    """The operator of a description, built by the factory of that name."""
    return FACTORIES[name].build(**description)


def operators(name: str, workers: int = 8) -> st.SearchStrategy[LinearOperator]:
    """The strategy of operators of a factory, on workers 0 to ``workers - 1``."""
    return describe(name, workers).map(lambda description: build(name, description))
