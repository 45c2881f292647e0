"""README and the pages that lead to all others: their code, pictures, links and numbers."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import subprocess
import sys
from collections import deque
from pathlib import Path
from statistics import median
from typing import Any

import pytest

import linop
from linop import errors
from linop.backends.mpi import mpirun
from linop.planning.verification import plan_errors
from linop.schedules import schedule_errors
from support.requirements import needs_mpi, needs_torch

ROOT = Path(__file__).resolve().parents[2]
DOCS, README = ROOT / "docs", ROOT / "README.md"
ASKED = {
    "how to install on my cluster": ("installation.md", "On a cluster"),
    "how to check an adjoint": ("testing.md", "In one process"),
    "how to run on two machines": ("clusters.md", "Start on two machines"),
    "what this error means": ("errors.md", "DeadlockError"),
    "which layers there are": ("torch_nn.md", "In linop.layers"),
    "what is fast and slow": ("speed.md", "What is slow"),
    "which adjoint has an all-reduce": (
        "parallel_models.md",
        "Which adjoint has an all-reduce?",
    ),
}
"""A question, and the page and heading that answer it."""
MADE = DOCS / "gallery"
"""Pages that are made when the site is built."""


def links(page: Path) -> list[Path]:
    """The files that a page links to, its toctree's included."""
    text = re.sub(r"(?ms)^```python$.*?^```$", "", page.read_text(encoding="utf-8"))
    found = re.findall(r"\]\(([^)\s#]+)(?:#[^)]*)?\)", text)
    for toctree in re.findall(r"(?s)```\{toctree\}\n(.*?)```", text):
        found += [f"{e}.md" for e in toctree.split("\n") if e and not e.startswith(":")]
    local = [(page.parent / link).resolve() for link in found if "://" not in link]
    return [link for link in local if MADE not in link.parents]


def clicks(start: Path) -> dict[Path, int]:
    """How many links lead from a page to each other one."""
    away, left = {start: 0}, deque([start])
    while left:
        page = left.popleft()
        for link in links(page) if page.suffix == ".md" else ():
            if link not in away:
                away[link] = away[page] + 1
                left.append(link)
    return away


@pytest.mark.parametrize("start", [README, DOCS / "index.md"], ids=["README", "front page"])
def test_three_clicks(start: Path) -> None:
    away = clicks(start)
    for question, (name, heading) in ASKED.items():
        page = DOCS / name
        assert away.get(page, 9) <= 3, f"{question}: {away.get(page)} clicks"
        assert re.search(rf"(?m)^##+ {re.escape(heading)}", page.read_text()), question
    assert {page.name for page in pages() if away.get(page, 9) > 3} == set()


def pages() -> list[Path]:
    folders = DOCS, DOCS / "api", DOCS / "coming_from"
    return [page for folder in folders for page in folder.glob("*.md")]


def test_a_page_is_missed() -> None:
    assert DOCS / "clusters.md" not in clicks(DOCS / "glossary.md")


@pytest.mark.parametrize("page", [README, *pages()], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    assert [link for link in links(page) if not link.exists()] == []


def test_each_page_is_in_one_toctree() -> None:
    entries = [
        (page.parent / f"{entry}.md").resolve()
        for page in pages()
        for toctree in re.findall(r"(?s)```\{toctree\}\n(.*?)```", page.read_text())
        for entry in toctree.split("\n")
        if entry and not entry.startswith(":")
    ]
    for page in {*pages()} - {DOCS / "index.md"}:
        assert entries.count(page) == 1, page.name


def test_readme_is_short_and_names_what_there_is() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 120
    for words in ("experts", "exact sums", "linop verify", "tox run -e demo", "Slurm"):
        assert words in text


COMPARED = """
import numpy as np
import linop

theirs, ours = {}, {}
exec(THEIRS, theirs)
exec(OURS, ours)
rank = theirs["comm"].rank
x = np.random.default_rng(rank).integers(-9, 10, 250).astype(float)
plan = ours["A"].compile(linop.backends.get("mpi"))
assert (plan(x) == theirs["forward"](x)).all()
assert (plan.H(x) == theirs["adjoint"](x)).all()
"""


@needs_mpi
@pytest.mark.timeout(300)
def test_readme_s_ten_lines_are_those_of_mpi4py(tmp_path: Path) -> None:
    theirs, ours = re.findall(r"(?s)```python\n(.*?)```", README.read_text(encoding="utf-8"))
    program = tmp_path / "compared.py"
    program.write_text(f"THEIRS, OURS = {theirs!r}, {ours!r}\n{COMPARED}", encoding="utf-8")
    done = mpirun.mpiexec(4, [sys.executable, str(program)], timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(ours.splitlines()) < len(theirs.splitlines())


def loaded(path: Path) -> dict[str, Any]:
    return runpy.run_path(str(path), run_name="loaded")


def test_pictures_are_those_that_are_drawn() -> None:
    """`python docs/pictures/concepts.py` renews them."""
    for name, draw in loaded(DOCS / "pictures/concepts.py")["PICTURES"].items():
        path = DOCS / "pictures" / f"{name}.svg"
        assert path.read_text(encoding="utf-8") == str(draw()), name


def test_speed_is_what_was_measured() -> None:
    """`python benchmarks/movement/plot.py` renews the picture."""
    shown = [one.ratio for one in loaded(ROOT / "benchmarks/movement/plot.py")["shown"]()]
    good = sum(ratio <= 1 for ratio in shown)
    readme, page = README.read_text(encoding="utf-8"), (DOCS / "speed.md").read_text()
    assert f"Of {len(shown)} cases" in readme and f"{good} are at or below" in readme
    assert f"Of {len(shown)} marks {good} are at or below 1" in page
    for text in (readme, page):
        assert f"median is {median(shown):.2f}" in text and f"worst {max(shown):.2f}" in text


def classes(module: Any) -> list[str]:
    """Names of the errors that a module defines."""
    return [
        name
        for name, kind in vars(module).items()
        if isinstance(kind, type)
        and issubclass(kind, errors.LinopError)
        and kind.__module__ == module.__name__
    ]


def test_each_error_has_its_place() -> None:
    page = (DOCS / "errors.md").read_text()
    for name in {*classes(errors)} - {"LinopError"}:
        assert f"\n## {name}\n\n**Why.**" in page and f"[{name}](#{name.lower()})" in page
        assert "**What to do.**" in page.split(f"\n## {name}\n")[1].split("\n## ")[0] or (
            name == "BackendError"
        )
    for name in (*classes(plan_errors), *classes(schedule_errors)):
        assert f"`{name}`" in page or f"## {name}\n" in page, name


def test_the_page_of_errors_knows_no_others() -> None:
    page = (DOCS / "errors.md").read_text()
    known = {*classes(errors), *classes(plan_errors), *classes(schedule_errors)}
    named = set(re.findall(r"(?m)^\| `(\w+Error)` \|", page))
    assert named <= known


def unknown(text: str) -> list[str]:
    """Names of linop's in spans of code, as `linop.layers.Conv2d`, that there are not."""
    prose = re.sub(r"(?ms)^```.*?^```$", "", text)
    spans = re.findall(r"`([^`\n]+)`", prose)
    names = {n for span in spans for n in re.findall(r"(?<![\w/.])linop(?:\.[a-zA-Z]\w*)+", span)}
    return sorted(name for name in names if not exists(name))


def exists(name: str) -> bool:
    at: Any = linop
    for k, part in enumerate(parts := name.split(".")):
        if k and not hasattr(at, part):
            if importlib.util.find_spec(".".join(parts[: k + 1])) is None:
                return False
            importlib.import_module(".".join(parts[: k + 1]))
        at = getattr(at, part) if k else at
    return True


@needs_torch
@pytest.mark.parametrize("page", [README, *pages()], ids=lambda page: page.name)
def test_names_in_prose_exist(page: Path) -> None:
    groups = ["linop.arrays"]  # of entry points
    assert [name for name in unknown(page.read_text("utf-8")) if name not in groups] == []


def test_a_name_that_does_not_exist_is_found() -> None:
    text = "`linop.errors.ShapeError`, `linop.fold(X)`\n```python\nlinop.none\n```\n"
    assert unknown(text) == ["linop.fold"]


CONSOLE = r"(?s)```console\n(.*?)```"


def folder_of_python() -> str:
    """A folder on the path where ``python`` is one that the quickstart asks for, and makes virtual
    environments; Debian's has neither the name nor, without another package, `venv`."""
    asked = "import ensurepip, sys; assert sys.version_info >= (3, 11); print(sys.base_prefix)"
    for folder in os.environ["PATH"].split(os.pathsep):
        python = Path(folder) / "python"
        if python.exists():
            done = subprocess.run(
                [python, "-c", asked], capture_output=True, check=False, text=True
            )
            found = Path(done.stdout.strip()) / "bin"
            if not done.returncode and (found / "python").exists():
                return str(found)
    pytest.skip("no python on the path makes virtual environments")


@needs_mpi
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_quickstart_s_steps_from_a_fresh_environment(tmp_path: Path) -> None:
    """All commands of the page, in order, in a copy of the sources; the blocks of Python are run by
    sybil, and here, too, in the new environment."""
    text = (DOCS / "quickstart.md").read_text(encoding="utf-8").split("## Tour")[0]
    clone = tmp_path / "clone"
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard", "linop", "backends",
         "layers", "setup.cfg", "pyproject.toml", "README.md", "LICENSE"],
        capture_output=True, check=False, text=True,
    )  # fmt: skip
    if listed.returncode:
        pytest.skip("the sources are no clone of a repository")
    for name in listed.stdout.splitlines():
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).write_bytes((ROOT / name).read_bytes())
    # Beside the clone, so that its folder does not hide the package.
    (tmp_path / "blur.py").write_bytes((DOCS / "quickstart/blur.py").read_bytes())
    blocks = re.findall(r"(?s)```python\n(.*?)```", text)
    (tmp_path / "typed.py").write_text("\n".join(blocks), encoding="utf-8")
    commands = [
        line.removeprefix("$ ")
        for block in re.findall(CONSOLE, text)
        for line in block.splitlines()
    ]
    install = next(k for k, command in enumerate(commands) if "pip install" in command)
    script = ["set -e", f"cd {clone}", *commands[: install + 1], f"cd {tmp_path}"]
    script += [*commands[install + 1 :], "python typed.py"]
    kept = ("HOME", "LANG", "TMPDIR", "PIP_", "SSL_", "OMPI_ALLOW", "http", "HTTP", "no_proxy")
    bare = {k: v for k, v in os.environ.items() if k.startswith(kept)}
    bare["PATH"] = os.pathsep.join([folder_of_python(), "/usr/bin", "/bin"])
    done = subprocess.run(
        ["bash", "-c", "\n".join(script)],
        env=bare, capture_output=True, check=False, text=True, timeout=840,
    )  # fmt: skip
    if done.returncode and re.search("No matching distribution|Failed to establish", done.stderr):
        pytest.skip("no package registry can be reached")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "worker 3 of 4: block (32, 24)" in done.stdout
