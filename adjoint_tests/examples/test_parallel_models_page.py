"""The programs, pictures and tables of docs/parallel_models.md."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from linop.testing import ParallelReport, check_parallel
from linop.testing.parallel.recording.programs import of_file
from linop.testing.parallel.twins.relations import Kind

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

PAGE = Path(__file__).resolve().parents[2] / "docs" / "parallel_models.md"
FOLDER = PAGE.with_suffix("")
NAMES = sorted(path.stem for path in (FOLDER / "families").glob("*.py"))


def loaded(path: Path) -> ModuleType:
    """A file of the page, as a module of its own."""
    spec = importlib.util.spec_from_file_location(f"parallel_models_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def section(name: str) -> str:
    """The part of the page about one program."""
    parts = re.split(r"^###? ", PAGE.read_text(), flags=re.MULTILINE)
    (found,) = (part for part in parts if f"(parallel_models/pictures/{name}.svg)" in part)
    return found


def kinds_of(name: str) -> set[str]:
    """The kinds that the page's table of symptoms has for a program."""
    title = section(name).splitlines()[0]
    (row,) = (line for line in PAGE.read_text().splitlines() if f"| [{title}](#" in line)
    return {kind.strip() for kind in row.strip("| ").rpartition("|")[2].split(";")}


def checked(name: str, case: str, monkeypatch: pytest.MonkeyPatch) -> ParallelReport:
    """The report of one version of a program."""
    monkeypatch.setenv("CASE", case)
    found = check_parallel(of_file(str(FOLDER / "families" / f"{name}.py")))
    assert found is not None
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_wrong_versions_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    report = checked(name, "wrong", monkeypatch)
    assert not report
    assert {str(one.kind) for one in report.findings} == kinds_of(name), str(report)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_right_versions_raise_no_alarm(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    report = checked(name, "right", monkeypatch)
    assert report, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["", ":ddp", ":fsdp"])
def test_the_file_to_copy(target: str) -> None:
    report = check_parallel(of_file(f"{FOLDER / 'my_model.py'}{target}"))
    assert report, str(report)


@pytest.mark.parametrize("name", NAMES)
def test_each_program_has_its_section(name: str) -> None:
    text = section(name)
    included = re.findall(r"literalinclude\} (\S+)", text)
    program = f"parallel_models/families/{name}.py"
    assert included == [program, program, f"parallel_models/reports/{name}.txt"]
    assert kinds_of(name) <= {str(kind) for kind in Kind}
    report = (FOLDER / "reports" / f"{name}.txt").read_text()
    assert report.startswith(f"$ CASE=wrong linop verify --torch {name}.py\n")


def test_the_page_has_all_kinds() -> None:
    for kind in Kind:
        assert f"\n| **{kind}** |" in PAGE.read_text()


def test_pictures_are_those_that_are_drawn() -> None:
    """`python docs/parallel_models/draw.py` renews them."""
    draw = loaded(FOLDER / "draw.py")
    assert sorted(draw.PICTURES) == NAMES
    for name, picture in draw.PICTURES.items():
        path = FOLDER / "pictures" / f"{name}.svg"
        assert path.read_text(encoding="utf-8") == draw.svg(picture), name
