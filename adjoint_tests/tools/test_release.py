"""Files of releases: they say the same version, name environments that exist, and follow the rules
that they are read by. The schemas of workflows and forms are checked by ``tox run -e lint``."""

from __future__ import annotations

import configparser
import importlib.util
import io
import re
import tarfile
import tomllib
from collections.abc import Iterator
from email.message import Message
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.version import Version

import linop

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
CALLERS = [*WORKFLOWS, ROOT / ".readthedocs.yaml", ROOT / ".pre-commit-config.yaml"]


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def settings(name: str) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(ROOT / name, encoding="utf-8")
    return parser


# Versions.


def test_the_citation_is_of_the_newest_version_in_the_changelog() -> None:
    citation = read(ROOT / "CITATION.cff")
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert newest and citation["version"] == newest[1]
    (paper,) = citation["references"]
    assert [author["family-names"] for author in paper["authors"]] == ["Hewett", "Grady"]


def test_without_tags_the_version_is_one_before_the_next_release() -> None:
    fallback = Version(PROJECT["setuptools_scm"]["fallback_version"])
    assert fallback.is_devrelease
    assert Version(fallback.base_version) >= Version(read(ROOT / "CITATION.cff")["version"])


def test_the_version_is_that_of_the_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Version(linop.__version__).base_version
    monkeypatch.setattr("importlib.metadata.Distribution.from_name", nothing_installed)
    assert Version(linop.__version__) == Version("0+unknown")


def nothing_installed(name: str) -> Any:
    from importlib.metadata import PackageNotFoundError

    raise PackageNotFoundError(name)


# Environments of tox.


def environments() -> set[str]:
    """The names of tox.ini's environments; braces stand for one name each."""
    found = set()
    for section in settings("tox.ini").sections():
        if section.startswith("testenv:"):
            parts = re.split(r"\{([^}]*)\}", section.removeprefix("testenv:"))
            choices = [part.split(",") if k % 2 else [part] for k, part in enumerate(parts)]
            found |= {"".join(choice) for choice in product(*choices)}
    return found


def called(value: Any) -> Iterator[str]:
    """Environments that a file asks tox for, in commands or in a matrix."""
    if isinstance(value, str):
        for names in re.findall(r"\btox run(?: -q)? -e (\S+)", value):
            yield from names.split(",")
    elif isinstance(value, list):
        for item in value:
            yield from called(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            if key == "env" and not isinstance(item, dict):
                yield from [item] if isinstance(item, str) else item
            else:
                yield from called(item)


@pytest.mark.parametrize("path", CALLERS, ids=lambda path: path.name)
def test_environments_exist(path: Path) -> None:
    names = set(called(read(path)))
    assert names and names <= environments()


def test_environments_are_found() -> None:
    assert {"lint", "py312", "py314", "tests-mpich"} <= environments()
    assert set(called({"run": "tox run -e a,b -- x", "env": ["c"]})) == {"a", "b", "c"}


def test_workflows_test_all_that_tox_runs() -> None:
    """And documentation, in a workflow of its own."""
    default = settings("tox.ini")["tox"]["env_list"].replace(" ", "").split(",")
    assert set(default) <= {name for path in WORKFLOWS for name in called(read(path))}


# What `tox run -e packages` checks, where it must fail.


@pytest.fixture(scope="module")
def packages() -> Any:
    spec = importlib.util.spec_from_file_location("packages", ROOT / ".ci/check_packages.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_release_is_of_its_tag_and_says_where_its_sources_are(packages: Any) -> None:
    facts = Message()
    facts["Version"] = "1.2.0"
    facts["Project-URL"] = "Paper, https://arxiv.org/abs/2006.03108"
    with pytest.raises(SystemExit, match=r"is v1\.2\.1, but the wheel's version is 1\.2\.0"):
        packages.check_release(facts, "v1.2.1")
    with pytest.raises(SystemExit, match=r"names no Source among project_urls, only \['Paper'\]"):
        packages.check_release(facts, "v1.2.0")
    facts["Project-URL"] = "Source, https://example.org"
    packages.check_release(facts, "v1.2.0")


def test_a_source_distribution_without_a_page_is_refused(packages: Any, tmp_path: Path) -> None:
    names = [
        file.relative_to(ROOT).as_posix()
        for folder in packages.CARRIED
        for file in (ROOT / folder).rglob("*")
    ]
    for left_out in ("", "docs/security.md"):
        with tarfile.open(tmp_path / "source.tar.gz", "w:gz") as archive:
            for name in names:
                if name != left_out:
                    archive.addfile(tarfile.TarInfo(f"linop_algebra-1/{name}"), io.BytesIO())
        if left_out:
            with pytest.raises(SystemExit, match=r"lacks files of docs/: \['docs/security\.md'\]"):
                packages.check_source(tmp_path / "source.tar.gz")
        else:
            packages.check_source(tmp_path / "source.tar.gz")


# Dependencies.


def test_the_recipe_needs_what_the_package_needs() -> None:
    options = settings("setup.cfg")["options"]
    wanted = [*options["install_requires"].split(), f"python{options['python_requires']}"]
    run = read(ROOT / "recipe/recipe.yaml")["requirements"]["run"]
    assert sorted(line.replace(" ", "") for line in run) == sorted(wanted)


# Notes of changes.


def complaint(name: str, text: str) -> str:
    """The fault of a fragment of changes/; empty if it has none."""
    kinds = "|".join(kind["directory"] for kind in PROJECT["towncrier"]["type"])
    if not re.fullmatch(rf"(\d+|\+[a-z0-9-]+)\.({kinds})\.md", name):
        return f"{name}: the name is not as changes/README.md has it"
    if not text.strip():
        return f"{name} is empty"
    if text.startswith(("-", "*", "#", " ")):
        return f"{name} opens with {text[0]!r}: the note alone, without a bullet or a title"
    return ""


def test_fragments() -> None:
    files = [file for file in (ROOT / "changes").iterdir() if file.name != "README.md"]
    found = [complaint(file.name, file.read_text(encoding="utf-8")) for file in files]
    assert [text for text in found if text] == []


@pytest.mark.parametrize(
    ("name", "text", "wrong"),
    [
        ("+a-note.added.md", "A note.", ""),
        ("32.fixed.md", "A note.", ""),
        ("note.added.md", "A note.", "the name is not"),
        ("+note.new.md", "A note.", "the name is not"),
        ("+note.added", "A note.", "the name is not"),
        ("+note.added.md", "\n", "is empty"),
        ("+note.added.md", "- A note.", "opens with '-'"),
    ],
)
def test_rules_of_fragments(name: str, text: str, wrong: str) -> None:
    found = complaint(name, text)
    assert wrong in found and bool(found) == bool(wrong)


def test_the_changelog_has_the_place_of_new_versions() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert text.count(PROJECT["towncrier"]["start_string"]) == 1
