"""The installed package has the tree's modules: none forgotten, none left over."""

import importlib
import json
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import pytest

import linop

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {
    "layers/strategies": "linop/strategies",
    "linop": "linop",
    "backends": "linop/backends",
    "layers": "linop/layers",
}
"""Folder of the tree → where its modules are installed: a module's is the first that it is in. A
folder that is not there has none."""


def in_tree() -> set[str]:
    """The modules of the tree, by the path at which a wheel installs them."""
    found: dict[Path, str] = {}
    for folder, home in FOLDERS.items():
        for module in (ROOT / folder).rglob("*.py"):
            found.setdefault(module, f"{home}/{module.relative_to(ROOT / folder).as_posix()}")
    return set(found.values())


def differences(wanted: Iterable[str], given: Iterable[str]) -> list[str]:
    """Differences of `given` from `wanted`, missing and extra, in words."""
    wanted, given = set(wanted), set(given)
    lacks = [f"not installed: {name}" for name in sorted(wanted - given)]
    return lacks + [f"not in the tree: {name}" for name in sorted(given - wanted)]


@pytest.fixture
def installed() -> set[str]:
    """The files of the distribution, if it was installed from this tree by copying."""
    try:
        distribution = metadata.distribution("linop-algebra")
    except metadata.PackageNotFoundError:
        pytest.skip("linop-algebra is not installed")
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    if not origin:
        pytest.skip("linop-algebra was installed from an index, not from this tree")
    if origin.get("dir_info", {}).get("editable"):
        pytest.skip("linop-algebra is installed in editable mode: nothing was copied")
    return {file.as_posix() for file in distribution.files or ()}


def test_every_module_is_installed(installed: set[str]) -> None:
    modules = {file for file in installed if file.startswith("linop/") and file.endswith(".py")}
    assert differences(in_tree(), modules) == []


def test_the_type_marker_is_installed(installed: set[str]) -> None:
    assert "linop/py.typed" in installed


def test_the_page_that_linop_explain_prints_is_installed(installed: set[str]) -> None:
    assert "linop/tools/errors.md" in installed


def test_that_page_is_a_link_to_that_of_the_site() -> None:
    """Of which a source distribution has a copy."""
    page, link = ROOT / "docs/errors.md", ROOT / "linop/tools/errors.md"
    assert link.read_bytes() == page.read_bytes()
    assert link.is_symlink() or not (ROOT / ".git").exists()


def test_differences_names_both_sides() -> None:
    """The helper must fail where it should."""
    assert differences(["linop/a.py", "linop/b.py"], ["linop/b.py", "linop/c.py"]) == [
        "not installed: linop/a.py",
        "not in the tree: linop/c.py",
    ]


def test_the_tree_has_modules() -> None:
    """An empty tree equals an empty wheel: the comparison would say nothing."""
    assert {"linop/__init__.py", "linop/backends/__init__.py"} <= in_tree()


def test_a_checkout_is_the_same_package() -> None:
    """Imported from its root, not installed: all floors are there, and nothing else of the tree."""
    text = f"""
import importlib, pathlib, sys
sys.path.insert(0, {str(ROOT)!r})
sys.meta_path = [m for m in sys.meta_path if "editable" not in repr(m).lower()]
import linop, linop.backends.threads.backend
assert pathlib.Path(linop.__file__).parent == pathlib.Path({str(ROOT)!r}) / "linop"
assert pathlib.Path(linop.backends.__file__).parts[-2:] == ("backends", "__init__.py")
for name in ("linop.linop", "linop.benchmarks", "linop.adjoint_tests", "linop.docs"):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        continue
    raise AssertionError(name)
print(linop.broadcast)
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_copy_of_a_checkout_is_not_mixed_with_the_installed_package(tmp_path: Path) -> None:
    """Also where that is another checkout, in editable mode."""
    for folder in ("linop", "backends"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    text = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import linop, linop.backends.threads.backend
print(linop.__file__, linop.backends.threads.backend.__file__, sep="\\n")
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [
        str(tmp_path / "linop/__init__.py"),
        str(tmp_path / "backends/threads/backend.py"),
    ]


MODULES = (
    "autograd backends errors fourier interop layers local_operators loops networks pictures "
    "planning schedules solvers strategies testing"
).split()


def test_public_names() -> None:
    """`dir(linop)`, which completion asks, has the public names and modules, and no module of the
    house."""
    shown = dir(linop)
    assert shown == sorted({*linop.__all__, *MODULES})
    assert linop.__all__ == sorted(linop.__all__, key=lambda n: (not n.isupper(), n.islower(), n))
    assert len(set(shown)) == len(shown)
    assert not {"spaces", "normal_form", "operators", "tools", "caching", "graph"} & set(shown)
    assert not {"provenance", "text", "writing", "trace_events", "svg", "verify"} & set(shown)
    for name in {*linop.__all__, *MODULES} - {"autograd", "layers", "strategies"}:
        assert getattr(linop, name) is not None


def test_completion_imports_nothing() -> None:
    """Neither `dir` nor the modules that need no torch import it; those that do are there."""
    text = """
import sys, linop
names, before = dir(linop), set(sys.modules)
assert "layers" in names and "strategies" in names
assert set(sys.modules) == before
for name in names:
    if name not in ("autograd", "layers", "strategies"):
        getattr(linop, name)
assert not {"torch", "mpi4py", "matplotlib"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", text], check=True)


MOVED = {
    "linop.local_operators": "convolution diagonal from_scipy matrix restriction",
    "linop.normal_form.movement": "Transfer",
    "linop.planning": "Cost Network Simulation TrafficMatrix traffic_matrix",
    "linop.solvers": "cgls",
}


def test_names_that_moved_warn_and_say_where_to() -> None:
    with pytest.deprecated_call(match=r"linop\.verify is linop\.verify_plans now"):
        assert linop.verify is linop.verify_plans
    for module, names in MOVED.items():
        for name in names.split():
            assert name not in dir(linop)
            with pytest.deprecated_call(match=rf"linop\.{name} is {module}\.{name} now"):
                assert getattr(linop, name) is getattr(importlib.import_module(module), name)


def test_what_compile_returns_is_a_plan() -> None:
    op = linop.identity(linop.Space(linop.Region("x", 2)))
    for name in ("reference", "threads"):
        assert isinstance(op.compile(linop.backends.get(name)), linop.Plan)
    held = linop.launch(lambda backend: isinstance(op.compile(backend), linop.Plan), 2, "threads")
    assert held == [True, True]
