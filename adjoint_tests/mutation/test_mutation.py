"""The faults of `mutation` can be planted, and its runner says which of them tests notice.

All of them, with the tests that notice them, are in ``docs/mutation.md``; here are their places,
and a few words on the runner itself.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import typer

from mutation import __main__ as command
from mutation import runner
from mutation.catalogue import FAULTS, ROOMS
from mutation.fault import KINDS, Fault, PlaceError, parsed, same
from mutation.runner import ROOT, Outcome, Run

pytestmark = pytest.mark.slow

OVERLAPS = "test_spaces.py::test_overlaps_and_contains_are_set_relations"

checkout = pytest.mark.skipif(not (ROOT / "linop").is_dir(), reason="this is no checkout")


@checkout
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_its_place_and_its_tests_exist(fault: Fault) -> None:
    ast.parse(fault.planted(ROOT), fault.file)
    assert not same(parsed(fault.before), parsed(fault.after))
    for test in fault.tests:
        file, _, function = test.partition("::")
        start = f"def {function.partition('[')[0] or 'test_'}"
        assert start in (ROOT / runner.target(ROOT, file)).read_text(), test


@checkout
def test_no_two_test_files_have_one_name() -> None:
    """A fault names a test's file without its folder."""
    names = [path.name for path in (ROOT / "adjoint_tests").rglob("test_*.py")]
    assert len(set(names)) == len(names)


def test_there_are_some_of_each_kind_in_each_part() -> None:
    assert {fault.kind for fault in FAULTS} == set(KINDS)
    assert all(ROOMS.values())
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names)


SOURCE = '''
class A:
    @property
    def f(self):
        """Text of
        two lines."""
        if self.x:
            return [  # a comment
                self.y + 1,
            ]
        elif self.z < 2: return 'é', self.y
        for k in range(3):
            def g(): self.total += k
        return f"{self.x}: {self.y}"
'''


@pytest.mark.parametrize(
    ("name", "before", "after", "wanted"),
    [
        (
            "A.f",
            "self.y+1",
            "self.y",
            ("[  # a comment\n                self.y + 1,\n            ]", "[self.y]"),
        ),
        ("A.f", "self.z<2", "self.z <= 2", ("self.z < 2", "self.z <= 2")),
        ("A.f", "('é', self.y)", "None", ("'é', self.y", "None")),
        ("A.f.g", "self.total += k", "self.total = k", ("self.total += k", "self.total = k")),
        ("A", 'f"{self.x}: {self.y}"', "''", ('f"{self.x}: {self.y}"', "''")),
        ("A.f", "property", "cached_property", ("@property", "@cached_property")),
    ],
)
def test_a_place_is_a_function_and_an_expression(
    tmp_path: Path, name: str, before: str, after: str, wanted: tuple[str, str]
) -> None:
    """However they are written, and wherever the function is."""
    (tmp_path / "linop").mkdir()
    (tmp_path / "linop/b.py").write_text(SOURCE)
    fault = Fault("a", "", "order", f"linop.b:{name}", before, after, ())
    text = fault.planted(tmp_path)
    assert same(ast.parse(text), ast.parse(SOURCE.replace(*wanted)))


def test_a_place_that_is_not_there_once_is_refused(tmp_path: Path) -> None:
    (tmp_path / "backends").mkdir()
    (tmp_path / "backends/b.py").write_text("def f():\n    return x, x\ndef g():\n    return x\n")
    for place, before, words in (
        ("linop.b:g", "x", "a: there is no file linop/b.py; backends/b.py has g: mend or remove"),
        ("linop.backends.b:h", "x", "a: backends/b.py has no h: mend or remove"),
        ("linop.backends.b:f", "x", "a: linop.backends.b:f has 'x' 2 times; once expected: mend"),
        ("linop.backends.b:g", "y", "a: linop.backends.b:g has 'y' 0 times; once expected: mend"),
    ):
        with pytest.raises(PlaceError, match="^" + re.escape(words)):
            Fault("a", "", "order", place, before, "z", ()).planted(tmp_path)


def planted(name: str, after: str, before: str = "max(a, c) < min(b, d)") -> Fault:
    """A fault in what the test of overlaps is about."""
    return Fault(
        name, "", "boundary", "linop.spaces.region:Subset.meets", before, after, (OVERLAPS,)
    )


@checkout
def test_faults_are_found_and_what_is_none_is_not() -> None:
    heard: list[str] = []
    wrong = planted("wrong", "max(a, c) <= min(b, d)")
    nothing = planted("nothing", "min(b, d) > max(a, c)")
    gone = planted("gone", "0", "nowhere()")
    found, not_found, no_place = runner.survey(
        [wrong, nothing, gone], 2, done=lambda one: heard.append(one.fault.name)
    )
    assert sorted(heard) == ["gone", "nothing", "wrong"]
    assert (found.caught, found.by) == (True, OVERLAPS)
    assert found.example
    assert found.seconds > 0
    assert (not_found.caught, not_found.by) == (False, "all tests passed")
    assert not no_place.caught
    assert no_place.by.startswith(
        "its place is gone: gone: linop.spaces.region:Subset.meets has 'nowhere()'"
    )


@checkout
def test_a_fault_that_hangs_is_none_that_was_noticed(tmp_path: Path) -> None:
    """And nothing of it is left."""
    stuck = planted("stuck", "__import__('time').sleep(99)")
    outcome = runner.attempt(stuck, ROOT, tmp_path, limit=5)
    assert not outcome.caught
    assert re.fullmatch(r"no end after \d+ s", outcome.by)
    assert not list(tmp_path.iterdir())


@checkout
def test_tests_that_fail_without_a_fault_are_told() -> None:
    missing = Fault(
        "a",
        "",
        "order",
        "linop.spaces.region:Subset.meets",
        "x",
        "y",
        ("test_spaces.py::test_nowhere",),
    )
    with pytest.raises(RuntimeError, match="the tests do not pass without a fault"):
        runner.survey([missing])


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
FAILED adjoint_tests/spaces/test_a.py::test_it[A D = K] - assert 1 == 2
"""


def test_reports_are_read() -> None:
    example = "seed=0, {'grid': (2,), 'shape': (3,)} 7"
    assert runner.judged(Run(1, REPORT, 1.0)) == (True, "test_a.py::test_it[A D = K]", example)
    explicit = REPORT.replace("Failing test case", "Failing explicit example")
    assert runner.example_in(explicit) == example
    several = re.sub("^E ", "    | ", REPORT, flags=re.MULTILINE)
    longer = several.replace("(2,)", "(2, 1)").partition("===")[0]
    assert runner.example_in(longer + several) == example
    assert runner.example_in("E   assert 1 == 2") == ""
    broken = "ERROR adjoint_tests/test_a.py - ImportError: x"
    assert runner.judged(Run(2, broken, 1.0)) == (True, "test_a.py", "")
    assert runner.judged(Run(-11, "", 1.0)) == (True, "pytest ended with status -11", "")
    assert runner.judged(Run(0, "3 passed", 1.0)) == (False, "all tests passed", "")
    assert runner.judged(Run(None, "", 12.3)) == (False, "no end after 12 s", "")
    with pytest.raises(RuntimeError, match="pytest did not run the tests"):
        runner.judged(Run(5, "no tests ran", 1.0))


def test_the_page_of_the_docs() -> None:
    place = "linop.c:D.e"
    row = Outcome(Fault("a", "b", "order", place, "", "", ()), True, "test_a.py::f", 2.34, "x | y")
    fault = Fault("d", "e", "order", place, "", "", ())
    missed = Outcome(fault, False, "all tests passed", 1.0, "")
    text = command.markdown_of([row, missed], "abc1234", 2)
    assert "| order | a: b | `c`, `D.e` | `test_a.py::f` | 2.3 | `x \\| y` |" in text
    assert "| d: e | `c`, `D.e` | `NOT CAUGHT: all tests passed` | 1.0 |  |" in text
    assert "**1 of 2 are caught**" in text
    assert f"| order | {KINDS['order']} | 2 | 1 |" in text
    assert "commit\nabc1234" in text
    assert len(command.shortened("x" * 500)) == command.SHOWN


def test_faults_are_chosen_by_name() -> None:
    assert command.chosen([]) == list(FAULTS)
    assert command.chosen([FAULTS[3].name]) == [FAULTS[3]]
    with pytest.raises(typer.BadParameter, match=r"no fault 'x'; there are .*, add twice"):
        command.chosen(["x"])
