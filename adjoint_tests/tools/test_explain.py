"""`linop explain`, the notes of errors, and the anchors of the page that both lead to."""

from __future__ import annotations

import ast
import copy
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from linop import errors
from linop.errors import LinopError, restated
from linop.tools import cli, explaining
from support.contracts.failing_calls import an_error_of_another_worker_is_explained_once
from support.requirements import needs_mpi
from support.workers import on_ranks, on_threads

ROOT = Path(__file__).resolve().parents[2]
SITE = "https://linop.example/en/stable"


def derived() -> list[str]:
    """Names of all classes of the sources that are derived from `LinopError`, with it. Others than
    ``…Error`` are caught inside of linop."""
    bases = {
        node.name: {base.id for base in node.bases if isinstance(base, ast.Name)}
        for folder in ("linop", "backends", "layers")
        for file in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    }
    found = {"LinopError"}
    while more := {name for name, above in bases.items() if above & found} - found:
        found |= more
    return sorted(name for name in found if name.endswith("Error"))


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The project's links, as its metadata name them."""
    given: list[str] = ["Paper, https://arxiv.org/abs/2006.03108"]
    named = SimpleNamespace(get_all=lambda key, otherwise: given or otherwise)
    monkeypatch.setattr(metadata, "metadata", lambda name: named)
    _forget()
    yield given
    monkeypatch.undo()
    _forget()


def _forget() -> None:
    errors.site.cache_clear()
    errors.explained_at.cache_clear()


def explain(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Any:
    monkeypatch.setattr(cli, "console", Console(width=100))
    return CliRunner().invoke(cli.app, ["explain", *arguments])


def test_the_sources_have_these_errors() -> None:
    """`derived` finds those of all folders, and nothing else."""
    names = derived()
    assert {"ShapeError", "MissingSendError", "TamperedError", "GradientError"} < set(names)
    assert "FailedExampleError" not in names and len(names) > 50


@pytest.mark.parametrize("name", derived())
def test_every_class_is_explained(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    done = explain(monkeypatch, name)
    assert done.exit_code == 0
    words = done.output.split()
    assert words[0] == name and "Why." in words and ("do." in words or name == "BackendError")
    assert "```" not in done.output and ".md" not in done.output
    assert errors.explained_at(name).endswith(f"`linop explain {name}`")


def test_nothing_else_is_explained() -> None:
    assert sorted(name for name, *_ in explaining.classes()) == derived()


@pytest.mark.parametrize(
    "given",
    ["deadlockerror", "linop.errors.DeadlockError", " linop.errors.DeadlockError: worker 0 waits"],
)
def test_a_class_as_it_is_pasted(given: str) -> None:
    assert explaining.text_of(given) == explaining.text_of("DeadlockError")


def test_a_class_without_a_section_of_its_own() -> None:
    text = explaining.text_of("MissingSendError")
    assert text.startswith(
        "## MissingSendError\n\nA message is received and never sent. It is a Pl"
    )
    assert explaining.text_of("PlanError").partition("\n\n")[2] in text


def test_all_classes_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    done = explain(monkeypatch)
    assert done.exit_code == 0
    assert sorted(re.findall(r"(?m)^│ +(\w+Error) +│", done.output)) == derived()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("Deadlock", "'Deadlock' is no error of linop; did you mean DeadlockError?"),
        ("ValueError", "'ValueError' is no error of linop; did you mean"),
        ("numpy", "'numpy' is no error of linop. `linop explain` lists all"),
        ("", "'' is no error of linop. `linop explain` lists all"),
    ],
)
def test_an_unknown_class(given: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    done = explain(monkeypatch, given)
    assert done.exit_code == 2
    assert said in " ".join(re.sub("[│╭╮╰╯─]", " ", done.output).split())


def test_addresses_once_there_is_a_site(links: list[str]) -> None:
    at = f"{SITE}/errors.html#shapeerror"
    assert errors.site() == "" and "http" not in explaining.text_of("BackendError")
    _forget()
    links.append(f"Documentation, {SITE}/")
    assert errors.site() == SITE
    assert errors.ShapeError("x").__notes__ == [
        f"Why this happens, and what to do: {at} or `linop explain ShapeError`"
    ]
    assert explaining.text_of("ShapeError").endswith(f"\n\n{at}")
    assert f"[Slurm]({SITE}/clusters.html#slurm)" in explaining.text_of("BackendError")


def test_a_checkout_that_is_not_installed_names_no_site(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise PackageNotFoundError(name)

    _forget()
    with monkeypatch.context() as patch:
        patch.setattr(metadata, "metadata", missing)
        assert errors.site() == ""
    _forget()


NOTE = "Why this happens, and what to do: `linop explain ShapeError`"


class MineError(errors.ShapeError):
    """A user's own class."""


def pickled(error: LinopError) -> Any:
    return pickle.loads(pickle.dumps(error))


@pytest.mark.usefixtures("links")
@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, pickled])
def test_an_error_that_is_copied_has_its_notes_once(again: Callable[[LinopError], Any]) -> None:
    error = errors.ShapeError("text")
    for notes in ([NOTE], [NOTE, "one more"], [NOTE, "one more", "another"]):
        twin = again(error)
        assert type(twin) is errors.ShapeError and twin.args == ("text",) and str(twin) == "text"
        assert error.__notes__ == twin.__notes__ == notes
        error.add_note(["one more", "another", "last"][len(notes) - 1])
    assert restated(error, "other").__notes__ == [NOTE]


def test_errors_of_others_are_as_they_were() -> None:
    """Also those that are derived from linop's: with no note, or with theirs."""
    error = MineError("text")
    assert not hasattr(error, "__notes__") and vars(error) == {}
    error.add_note("theirs")
    assert error.__notes__ == pickled(error).__notes__ == ["theirs"]


def test_a_class_of_the_house_is_its_base() -> None:
    class Refused(errors.PartitionError):
        __module__ = "linop.strategies"

    assert Refused("text").__notes__ == errors.PartitionError("text").__notes__


def test_an_error_that_is_caught_costs_nothing() -> None:
    """Its note is made when somebody looks."""
    assert vars(errors.ShapeError("text")) == {}


@needs_mpi
def test_an_error_of_another_rank_has_its_note_once() -> None:
    on_ranks(2, an_error_of_another_worker_is_explained_once)


def test_an_error_of_another_thread_has_its_note_once() -> None:
    on_threads(2, an_error_of_another_worker_is_explained_once)


def test_the_note_stands_under_the_traceback() -> None:
    text = "import linop; linop.TensorSpace((6,), linop.Partition((2,))).slices(9)"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    *_, error, note = done.stderr.splitlines()
    assert error.startswith("linop.errors.PartitionError: ")
    assert note.startswith("Why this happens") and note.endswith("`linop explain PartitionError`")


def test_an_error_of_the_command_line_has_its_note() -> None:
    """It has no traceback, under which that would stand."""
    text = (
        "import sys, linop; from linop.tools import cli; sys.argv = ['linop', 'show', 'm:op']\n"
        "X = linop.TensorSpace((6,), linop.Partition((2,)))\n"
        "cli._operators = lambda target, workers: X.slices(9)\n"
        "cli.main()"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    error, note = done.stderr.splitlines()
    assert done.returncode == 1 and error.startswith("error: ")
    assert note.endswith("`linop explain PartitionError`")


@pytest.fixture
def built(tmp_path: Path) -> str:
    """The page as the site has it."""
    pytest.importorskip("myst_parser", reason="Sphinx and MyST are not installed")
    source = tmp_path / "docs"
    source.mkdir()
    (source / "errors.md").write_text(explaining.page(), encoding="utf-8")
    names = [*derived(), "LostError"]
    (source / "reference.py").write_text(
        "from linop.errors import LinopError\n"
        f"globals().update((name, type(name, (LinopError,), {{}})) for name in {names})\n",
        encoding="utf-8",
    )
    (source / "conf.py").write_text(
        f"import sys; sys.path[:0] = {[str(ROOT / 'docs/_ext'), str(source)]}\n"
        "extensions = ['myst_parser', 'error_anchors', 'breakable']\n"
        f"autosummary_context = {{'pages': {[f'reference.{name}' for name in names]}}}\n"
        "root_doc, myst_heading_anchors = 'errors', 3\n"
        "def setup(app): app.add_config_value('autosummary_context', {}, '')\n",
        encoding="utf-8",
    )
    command = sys.executable, "-m", "sphinx", "-q", "-b", "html", source, tmp_path / "html"
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # Said of a class that is in the reference, and not on the page.
    assert "no anchor for LostError" in done.stderr
    return (tmp_path / "html/errors.html").read_text(encoding="utf-8")


def test_the_site_has_an_anchor_for_each_class(built: str, links: list[str]) -> None:
    links.append(f"Documentation, {SITE}/")
    there = re.findall(r'\bid="([\w-]+)"', built)
    for name in derived():
        address = re.search(r"https:\S+", errors.explained_at(name))
        assert address and there.count(address[0].partition("#")[2]) == 1, name
