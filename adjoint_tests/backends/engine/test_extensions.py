"""Backends and array modules of other packages, found by their entry points."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import linop
from linop import COPIES, Partition, TensorSpace
from linop.errors import ArgumentError, BackendError

MODULE = """
from linop.backends.engine.arrays.interface import Arrays
from linop.backends.threads import backend as threads


class Aligned(Arrays):
    name = "aligned"


def get(workers=None):
    return threads.Threads(workers, Aligned())


def launch(main, workers=None):
    return threads.launch(main, workers, Aligned())
"""
POINTS = """
[linop.backends]
other = other_backend
threads = other_backend
broken = no_such_module
[linop.arrays]
aligned = other_backend:Aligned
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package with entry points, as pip installs them."""
    (tmp_path / "other_backend.py").write_text(MODULE)
    about = tmp_path / "other_backend-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: other-backend\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(POINTS)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("other_backend", None)


@pytest.mark.usefixtures("package")
def test_a_backend_of_another_package() -> None:
    op = linop.all_reduce(TensorSpace((3,), Partition((2,)), axes=(COPIES,)))
    x = op.domain.random(0)
    backend = linop.backends.get("other", workers=2)
    assert backend.arrays.name == "aligned"
    found, wanted = op.compile(backend)(x), op(x)
    assert all(np.array_equal(found[r.name], wanted[r.name]) for r in op.codomain.regions)
    names = linop.launch(lambda backend: backend.arrays.name, 2, "other")
    assert names == ["aligned", "aligned"]
    assert linop.backends.get("threads", arrays="aligned").arrays.name == "aligned"
    assert linop.backends.names()[-2:] == ["broken", "other"]


@pytest.mark.usefixtures("package")
def test_a_backend_that_runs_no_programs() -> None:
    module = importlib.import_module("other_backend")
    del module.launch
    with pytest.raises(
        BackendError, match=r"'other' runs no programs: .* no launch\(main, workers"
    ):
        linop.launch(print, 2, "other")


@pytest.mark.usefixtures("package")
def test_own_names_are_not_replaced() -> None:
    assert linop.backends.get("threads", workers=1).arrays.name == "numpy"


@pytest.mark.usefixtures("package")
def test_names_that_lead_nowhere() -> None:
    with pytest.raises(ArgumentError, match=r"'broken' of other-backend .* 'no_such_module'"):
        linop.backends.get("broken")
    with pytest.raises(ArgumentError, match=r"^backend: expected one of .*, other; given 'none'"):
        linop.backends.get("none")
    with pytest.raises(ArgumentError, match=r"^arrays: .*numpy, cupy, aligned; given 'jax'"):
        linop.backends.get("threads", arrays="jax")
    with pytest.raises(ArgumentError, match=r"^arrays: .*given 3"):
        linop.backends.get("threads", arrays=3)
