"""Meshes: named axes of all workers, each group with a backend of its own."""

from __future__ import annotations

import importlib.util

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

from linop.errors import BackendError, DeadlockError
from linop.strategies import Mesh
from support.requirements import needs_mpi
from support.strategies.meshes import (
    fails_alone,
    is_a_grid,
    is_cut_again,
    says_what_is_wrong,
    trains_pipelines,
    waits_crosswise,
)
from support.torchrun import on_torchrun
from support.workers import on_ranks, on_threads

GRIDS = [
    (1, {"dp": 1}),
    (2, {"dp": 2, "tp": 1}),
    (3, {"pp": 3}),
    (4, {"dp": 2, "tp": 2}),
    (6, {"dp": 3, "pp": 2}),
    (8, {"dp": 2, "tp": 2, "pp": 2}),
]


@pytest.mark.parametrize(("workers", "axes"), GRIDS, ids=str)
def test_mesh_on_threads(workers: int, axes: dict[str, int]) -> None:
    on_threads(workers, is_a_grid, axes)


@needs_mpi
@pytest.mark.parametrize(("workers", "axes"), [g for g in GRIDS if g[0] <= 4], ids=str)
def test_mesh_on_ranks(workers: int, axes: dict[str, int]) -> None:
    on_ranks(workers, is_a_grid, axes)


@pytest.mark.parametrize(("workers", "axes"), [g for g in GRIDS if g[0] in (1, 2, 3, 4)], ids=str)
def test_mesh_on_torchrun(workers: int, axes: dict[str, int]) -> None:
    on_torchrun(workers, is_a_grid, axes)


def test_mesh_is_cut_again() -> None:
    on_threads(4, is_cut_again)
    on_torchrun(4, is_cut_again)


@needs_mpi
def test_mesh_is_cut_again_on_ranks() -> None:
    on_ranks(4, is_cut_again)


def test_errors_of_meshes() -> None:
    on_threads(2, says_what_is_wrong)
    on_torchrun(2, says_what_is_wrong)
    with pytest.raises(BackendError, match="holds all workers"):
        from linop.backends import get

        Mesh(get("threads"), dp=1)


@needs_mpi
def test_errors_of_meshes_on_ranks() -> None:
    on_ranks(2, says_what_is_wrong)


def test_failed_call_of_one_group() -> None:
    on_threads(4, fails_alone)


@needs_mpi
def test_failed_call_of_one_group_on_ranks() -> None:
    on_ranks(4, fails_alone)
    on_ranks(4, fails_alone, windows=False)


def test_deadlock_across_axes_is_found() -> None:
    with pytest.raises(DeadlockError, match=r"of workers 1, 3, numbered from 0"):
        on_threads(4, waits_crosswise)


def test_pipelines_along_an_axis() -> None:
    on_threads(4, trains_pipelines)
    on_torchrun(4, trains_pipelines)


@needs_mpi
def test_pipelines_along_an_axis_on_ranks() -> None:
    on_ranks(4, trains_pipelines)
