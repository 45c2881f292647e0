"""The examples in docstrings of public names: each is run, and prints what it says."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
import sys
import traceback
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import linop
from linop import errors
from support.public_names import HAS_TORCH, MODULES, public

SHOWN = {
    "linop.errors.MissingExtraError",
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
    named = [(f"linop.errors.{name}", value) for name, value in vars(errors).items()]
    of_errors = [(name, value) for name, value in named if name.endswith("Error")]
    for name, value in [*public(MODULES), *of_errors]:
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


def joined(*error: Any) -> list[str]:
    return ["".join(traceback.format_exception_only(*error))]


@pytest.fixture
def whole_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Python 3.11.2 doctest compares the last line of an error alone, which is that of a note;
    in 3.11.7 all of them."""
    if sys.version_info < (3, 11, 7):
        seen = SimpleNamespace(**vars(traceback) | {"format_exception_only": joined})
        monkeypatch.setattr(doctest, "traceback", seen)


@pytest.mark.usefixtures("whole_errors")
@pytest.mark.parametrize("name", OBJECTS)
def test_examples_print_what_they_say(name: str) -> None:
    failures: list[str] = []
    for test in examples(name, OBJECTS[name]):
        if not HAS_TORCH and any("torch." in example.source for example in test.examples):
            continue
        doctest.DocTestRunner(optionflags=FLAGS, verbose=False).run(test, out=failures.append)
    assert not failures, "\n".join(failures)


NAMED = re.compile(r"\*{0,2}\w[\w.]*(?:, \*{0,2}\w[\w.]*)*(?:,$|: (?!\w\. )\S)")
"""The beginning of an entry: names, and what is said of them, there or below a last comma; that
does not begin as the items of lists do that are numbered in letters."""


def misread(text: str) -> Iterator[str]:
    """Lines that the reference takes for other than was meant: a line of arguments, attributes or
    errors at their indentation for a name, whatever it says; a line of results that is indented
    for the definition of the one before."""
    for title, own in re.findall(r"(?ms)^([A-Z]\w+):\n(.*?)(?:\n\n|\Z)", inspect.cleandoc(text)):
        lines, above = own.splitlines(), ""
        if title in ("Args", "Attributes", "Raises"):
            for line in lines:
                entry = line[:5].strip() != "" and not above.endswith(",")
                if entry and not NAMED.match(line.strip()):
                    yield f"{title}: {line.strip()}"
                above = line if line[:5].strip() else above
        elif title == "Returns":
            yield from (
                f"{title}: {line.strip()}" for line in lines[1:] if line.startswith(" " * 5)
            )


@pytest.mark.parametrize("name", OBJECTS)
def test_lists_of_docstrings_are_read_as_meant(name: str) -> None:
    value = OBJECTS[name]
    finder = doctest.DocTestFinder(exclude_empty=False)
    bases = value.__mro__[1:] if inspect.isclass(value) else ()
    for one in (value, *(base for base in bases if base.__module__.startswith("linop."))):
        for found in finder.find(one, name):
            assert list(misread(found.docstring)) == [], found.name


def test_a_list_that_is_misread_is_found() -> None:
    """Each kind of line, beside those that are read as meant."""
    text = """A function.

    Args:
        x, y: numbers,
            and more.
        a, b,
        c: of both.
        as the class.
        d: F. A map.

    Returns:
        A number that is
            long.

    Raises:
        ShapeError, linop.errors.DTypeError: x does not fit. SpaceError: nor
        does y.
    """
    wrong = ["Args: as the class.", "Args: d: F. A map.", "Returns: long.", "Raises: does y."]
    assert list(misread(text)) == wrong
    assert list(misread("Sums.\n\nReturns:\n    One of\n    several.\n")) == []


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
