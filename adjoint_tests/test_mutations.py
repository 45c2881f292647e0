"""The faults of `mutations` can be planted, and `mutate` tells those that tests notice from others.

All of them, with the tests that notice them, are in ``docs/mutation.md``; here are a few words on
the runner itself.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import typer

import mutants
import mutate
import mutations
from mutants import ROOT, Outcome, Run
from mutations import Fault

FAULTS = mutations.every()
HERE = Path(__file__).parent
OVERLAPS = "test_spaces.py::test_overlaps_and_contains_are_set_relations"

checkout = pytest.mark.skipif(not (ROOT / "linop").is_dir(), reason="this is no checkout")


@checkout
def test_every_fault_can_be_planted() -> None:
    """Its text is there once, what comes of it is Python, and the tests that are to notice it are
    there."""
    for fault in FAULTS:
        ast.parse(fault.planted((ROOT / fault.file).read_text()), fault.file)
        assert fault.before.strip() != fault.after.strip(), fault.name
        for test in fault.tests:
            file, _, function = test.partition("::")
            start = f"def {function.partition('[')[0] or 'test_'}"
            assert start in (HERE / file).read_text(), (fault.name, test)


def test_there_are_many_on_every_floor() -> None:
    assert len(FAULTS) >= 45
    assert {fault.file.partition("/")[0] for fault in FAULTS} == {"linop", "backends", "layers"}


def test_text_that_is_not_there_once_is_refused() -> None:
    fault = Fault("a", "", "b.py", "x = 1", "x = 2", ())
    assert fault.planted("x = 1\ny = x\n") == "x = 2\ny = x\n"
    for text, count in (("y = 1", 0), ("x = 1; x = 1", 2)):
        with pytest.raises(ValueError, match=rf"^a: b.py has the text 'x = 1' {count} times; once"):
            fault.planted(text)


def planted(name: str, after: str) -> Fault:
    """A fault in what the test of overlaps is about."""
    before = "max(a, c) < min(b, d)"
    return Fault(name, "", "linop/region.py", before, after, (OVERLAPS,))


@checkout
def test_faults_are_found_and_what_is_none_is_not() -> None:
    heard: list[str] = []
    wrong = planted("wrong", "max(a, c) <= min(b, d)")
    nothing = planted("nothing", "min(b, d) > max(a, c)")
    found, not_found = mutants.survey([wrong, nothing], 2, done=lambda one: heard.append(one.fault))
    assert sorted(heard) == ["nothing", "wrong"]
    assert (found.caught, found.by) == (True, OVERLAPS)
    assert found.example
    assert found.seconds > 0
    assert (not_found.caught, not_found.by) == (False, "all tests passed")
    for fault in (wrong, nothing):
        assert (ROOT / fault.file).read_text().count(fault.before) == 1


@checkout
def test_a_fault_that_hangs_is_none_that_was_noticed(tmp_path: Path) -> None:
    """And nothing of it is left."""
    stuck = planted("stuck", "__import__('time').sleep(99)")
    outcome = mutants.attempt(stuck, ROOT, tmp_path, limit=5)
    assert not outcome.caught
    assert re.fullmatch(r"no end after \d+ s", outcome.by)
    assert not list(tmp_path.iterdir())


@checkout
def test_tests_that_fail_without_a_fault_are_told() -> None:
    missing = Fault("a", "", "linop/region.py", "max(a, c)", "min(a, c)", ("test_nowhere.py",))
    with pytest.raises(RuntimeError, match="the tests do not pass without a fault"):
        mutants.survey([missing])


REPORT = """
    raise AssertionError
E   assert 1 == 2
E   Failing test case: test_it(
E       name='shift',
E       data=data(...),
E       seed=0,
E   )
E   Draw 1 (shift): {'grid': (2,),
E    'shape': (3,)}
E   Draw 2: 7
E
E   You can reproduce this example by temporarily adding …
=== short test summary info ===
FAILED adjoint_tests/test_a.py::test_it[A D = K] - assert 1 == 2
"""


def test_reports_are_read() -> None:
    example = "seed=0, {'grid': (2,), 'shape': (3,)} 7"
    assert mutants.judged(Run(1, REPORT, 1.0)) == (True, "test_a.py::test_it[A D = K]", example)
    explicit = REPORT.replace("Failing test case", "Failing explicit example")
    assert mutants.example_in(explicit) == example
    several = re.sub("^E ", "    | ", REPORT, flags=re.MULTILINE)
    longer = several.replace("(2,)", "(2, 1)").partition("===")[0]
    assert mutants.example_in(longer + several) == example
    assert mutants.example_in("E   assert 1 == 2") == ""
    broken = "ERROR adjoint_tests/test_a.py - ImportError: x"
    assert mutants.judged(Run(2, broken, 1.0)) == (True, "test_a.py", "")
    assert mutants.judged(Run(-11, "", 1.0)) == (True, "pytest ended with status -11", "")
    assert mutants.judged(Run(0, "3 passed", 1.0)) == (False, "all tests passed", "")
    assert mutants.judged(Run(None, "", 12.3)) == (False, "no end after 12 s", "")
    with pytest.raises(RuntimeError, match="pytest did not run the tests"):
        mutants.judged(Run(5, "no tests ran", 1.0))


def test_the_page_of_the_docs() -> None:
    row = Outcome("a", "b", "c.py", True, "test_a.py::test_it", 2.34, "x | y")
    missed = Outcome("d", "e", "f.py", False, "all tests passed", 1.0, "")
    text = mutate.markdown_of([row, missed], "abc1234", 2)
    assert "| a: b | `c.py` | `test_a.py::test_it` | 2.3 | `x \\| y` |" in text
    assert "| d: e | `f.py` | `NOT CAUGHT: all tests passed` | 1.0 |  |" in text
    assert "**1 of 2 are caught**" in text
    assert "commit\nabc1234" in text
    assert len(mutate.shortened("x" * 500)) == mutate.SHOWN


def test_faults_are_chosen_by_name() -> None:
    assert mutate.chosen([]) == list(FAULTS)
    assert mutate.chosen([FAULTS[3].name]) == [FAULTS[3]]
    with pytest.raises(typer.BadParameter, match=r"no fault 'x'; there are .*, move keeps its "):
        mutate.chosen(["x"])
