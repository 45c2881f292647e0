"""States and norms of modules that are tensor parallel, and sharded over another axis."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

from support.requirements import needs_mpi
from support.strategies.tensor.nested_blocks import (
    Nested,
    differs,
    is_its_twin,
    loads,
    one_unit,
    pipelines_side_by_side,
    saves,
    takes_subclasses,
    uses_a_cut_weight,
)
from support.strategies.tensor.tensor_networks import Case
from support.workers import on_ranks, on_threads

SHARED = Case(width=4, blocks=1, groups=2, bias=False, tied=False, sequence=True)


@pytest.mark.parametrize("stage", [1, 3])
def test_on_threads(stage: int) -> None:
    on_threads(4, is_its_twin, Nested(stage=stage))


@pytest.mark.parametrize("dp, tp", [(2, 4), (1, 2)])
def test_meshes(dp: int, tp: int) -> None:
    on_threads(dp * tp, is_its_twin, Nested(dp, tp, 3, SHARED))


def test_tensor_parallel_and_other_modules_in_one_unit() -> None:
    on_threads(4, one_unit)


@needs_mpi
def test_on_ranks() -> None:
    on_ranks(4, is_its_twin, Nested())


def test_other_meshes_load_files_and_folders(tmp_path: Path) -> None:
    on_threads(4, saves, str(tmp_path), Nested())
    on_threads(6, loads, str(tmp_path), Nested(3, 2, 3))


def test_differences_are_errors() -> None:
    on_threads(4, differs)


def test_pipelines_side_by_side() -> None:
    on_threads(8, pipelines_side_by_side)


def test_a_function_of_a_cut_weight() -> None:
    on_threads(4, uses_a_cut_weight)


def test_subclasses_of_linear_layers() -> None:
    on_threads(2, takes_subclasses)
