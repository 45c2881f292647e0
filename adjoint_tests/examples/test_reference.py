"""The reference: every public name is on a page, and names of other projects exist."""

from __future__ import annotations

import importlib
import inspect
import re
import runpy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from linop import errors
from linop.planning.verification import plan_errors
from linop.schedules import schedule_errors
from support.public_names import HAS_TORCH, TORCH, public
from support.requirements import needs_torch

DOCS = Path(__file__).resolve().parents[2] / "docs"
LISTS: dict[str, Any] = runpy.run_path(str(DOCS / "_ext/api_lists.py"))
BESIDE = ("linop.spaces.direct_sums.DirectSumSpace", "linop.spaces.weighted.InnerProduct")
"""Classes that users get and do not name, which are on pages all the same."""
INVENTORIES = sorted((DOCS / "_inventories").glob("*.txt"))


def value_of(name: str) -> Any:
    module, _, own = name.rpartition(".")
    return getattr(importlib.import_module(module), own)


def listed() -> dict[str, Any]:
    """The names of all pages, and what they are."""
    names = LISTS["listed"](DOCS / "api")
    there = [name for name in names if HAS_TORCH or name.split(".")[1] not in TORCH]
    return {name: value_of(name) for name in there}


def expected() -> dict[str, Any]:
    """The public names, with all classes of errors."""
    found = dict(public()) | {name: value_of(name) for name in BESIDE}
    for module in (errors, plan_errors, schedule_errors):
        for name, value in vars(module).items():
            own = inspect.isclass(value) and value.__module__ == module.__name__
            if own and issubclass(value, errors.LinopError):
                found[f"{module.__name__}.{name}"] = value
    return found


def test_every_public_name_is_on_a_page() -> None:
    known = {id(value) for value in listed().values()}
    assert [name for name, value in expected().items() if id(value) not in known] == []


def test_pages_have_public_names_alone() -> None:
    known = {id(value) for value in expected().values()}
    assert [name for name, value in listed().items() if id(value) not in known] == []


def test_each_object_has_one_page() -> None:
    seen: dict[int, str] = {}
    for name, value in listed().items():
        assert id(value) not in seen, f"{name} is {seen[id(value)]}"
        seen[id(value)] = name


def test_a_name_on_two_pages_is_refused(tmp_path: Path) -> None:
    for page in ("one", "two"):
        text = "# Page\n\n```{eval-rst}\n.. currentmodule:: linop\n\n   Space\n```\n"
        tmp_path.joinpath(f"{page}.md").write_text(text)
    with pytest.raises(ValueError, match=r"two\.md: linop\.Space is listed on one, too"):
        LISTS["listed"](tmp_path)


def test_files_differ_in_more_than_capitals() -> None:
    names = list(LISTS["listed"](DOCS / "api"))
    files = LISTS["file_names"](names)
    made = [files.get(name, name).lower() for name in names]
    assert len(set(made)) == len(made)
    assert files["linop.loops.evolution"] == "linop.loops.evolution-function"


def test_the_reference_names_all_its_pages() -> None:
    text = (DOCS / "api.md").read_text(encoding="utf-8")
    for page in (DOCS / "api").glob("*.md"):
        assert f"(api/{page.name})" in text and f"\napi/{page.stem}\n" in text, page.name


def names_of(inventory: Path) -> list[tuple[str, str, str]]:
    first, _, _, *lines = inventory.read_text(encoding="utf-8").splitlines()
    assert first == "# Sphinx inventory version 1"
    return [(name, kind, page) for name, kind, page in map(str.split, lines)]


def exists(name: str) -> bool:
    """True if a name can be imported, or is an attribute of what can."""
    parts = name.split(".")
    for k in range(len(parts), 0, -1):
        try:
            at = importlib.import_module(".".join(parts[:k]))
        except ImportError:
            continue
        for part in parts[k:]:
            if not hasattr(at, part):
                return False
            at = getattr(at, part)
        return True
    return hasattr(importlib.import_module("builtins"), name)


@pytest.mark.parametrize("inventory", INVENTORIES, ids=lambda path: path.stem)
def test_names_of_other_projects_exist(inventory: Path) -> None:
    """Names, those of MPI in its stubs, since importing it starts MPI."""
    project, names = inventory.stem, names_of(inventory)
    if project == "torch" and not HAS_TORCH:
        pytest.skip("without torch")
    if project == "mpi4py":
        spec = find_spec("mpi4py")
        if spec is None:
            pytest.skip("without mpi4py")
        stub = Path(str(spec.origin)).with_name("MPI.pyi").read_text(encoding="utf-8")
        assert [name for name, *_ in names if f"class {name.split('.')[-1]}" not in stub] == []
    else:
        assert [name for name, *_ in names if not exists(name)] == []
    assert names == sorted(names) and len({name for name, *_ in names}) == len(names)
    assert all(re.fullmatch(r"[\w./-]+\.html", page) for *_, page in names)


@needs_torch
def test_a_name_that_is_not_there_is_found() -> None:
    assert exists("torch.nn.Linear") and not exists("torch.nn.Liner") and not exists("liner")
