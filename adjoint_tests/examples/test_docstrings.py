"""The examples in docstrings of public names: each is run, and prints what it says."""

from __future__ import annotations

import doctest
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import linop
from support.public_names import HAS_TORCH, MODULES, public

SHOWN = {
    "linop.interop.from_distributed_array",
    "linop.interop.to_distributed_array",
    "linop.interop.to_pylops_mpi",
    "linop.testing.FailedExampleError",
    "linop.testing.ParallelReport",
    "linop.testing.assert_parallel",
    "linop.testing.check_mpi",
    "linop.testing.check_parallel",
    "linop.testing.pylops_mpi_operator",
    "linop.testing.spmd",
}
"""Objects whose examples are programs of their own, or need other packages: shown, not run here."""
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def objects() -> Iterator[tuple[str, Any]]:
    """Each public function and class, once, by its shortest name."""
    seen = set()
    for name, value in public(MODULES):
        documented = inspect.isclass(value) or inspect.isroutine(value)
        if documented and id(value) not in seen:
            seen.add(id(value))
            yield name, value


def namespace() -> dict[str, Any]:
    """Names that every example finds, as the reference's first page says."""
    names: dict[str, Any] = {"np": np, "linop": linop}
    if HAS_TORCH:
        names |= {
            "torch": importlib.import_module("torch"),
            "layers": importlib.import_module("linop.layers"),
            "strategies": importlib.import_module("linop.strategies"),
        }
    return names


OBJECTS = dict(objects())
PUBLIC = [value for value in OBJECTS.values() if inspect.isclass(value)]


def examples(name: str, value: Any) -> Iterator[doctest.DocTest]:
    """The object's; of a class also its methods', those of bases without a name included."""
    bases = value.__mro__[1:] if inspect.isclass(value) else ()
    own = [base for base in bases if base.__module__.startswith("linop.") and base not in PUBLIC]
    for one in (value, *own):
        yield from doctest.DocTestFinder().find(one, name, globs=namespace())


@pytest.mark.parametrize("name", OBJECTS)
def test_examples_print_what_they_say(name: str) -> None:
    failures: list[str] = []
    for test in examples(name, OBJECTS[name]):
        if not HAS_TORCH and any("torch." in example.source for example in test.examples):
            continue
        doctest.DocTestRunner(optionflags=FLAGS, verbose=False).run(test, out=failures.append)
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("name", OBJECTS)
def test_each_object_has_an_example(name: str) -> None:
    """In a docstring of its own: those of classes are not inherited."""
    mark = "::\n" if name in SHOWN else ">>> "
    assert mark in (OBJECTS[name].__doc__ or ""), f"{name}: no example"


def test_the_methods_of_bases_are_read() -> None:
    found = [test.name for test in examples("it", linop.LinearOperator) if test.examples]
    assert "it" in found and "it.trace" in found


def test_a_wrong_example_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong() -> None:
        """
        >>> 1 + 1
        3
        """

    monkeypatch.setitem(OBJECTS, "wrong", wrong)
    with pytest.raises(AssertionError, match="Expected"):
        test_examples_print_what_they_say("wrong")
