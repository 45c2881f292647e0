"""Models of transformers as they are, tensor and sequence parallel, beside one process in
float64."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

if any(find_spec(name) is None for name in ("torch", "transformers")):
    pytest.skip(
        "torch or transformers is not installed: pip install 'linop-algebra[models]'",
        allow_module_level=True,
    )

import linop
from support.requirements import needs_mpi
from support.strategies.tensor.model_cuts import (
    PLANS,
    agrees_by_check,
    compiles_at_the_first_call,
    computes_again,
    folder,
    goes_on_elsewhere,
    steps_as_one_process,
)
from support.workers import on_ranks, on_threads

OWN = [name for name in PLANS if name not in ("GPT-2", "T5")]
CELLS = [(name, kind) for name, plans in PLANS.items() for kind in plans]
FUSED = [("GPT-2", "tensor"), ("Phi-3", "tensor")]


@pytest.mark.parametrize(("name", "kind"), CELLS)
def test_steps_on_threads(name: str, kind: str) -> None:
    for workers in (1, 2) if name in ("GPT-2", "Qwen3") else (2,):
        on_threads(workers, steps_as_one_process, name, kind)


@pytest.mark.parametrize("name", OWN)
def test_own_plans_on_threads(name: str) -> None:
    """Also with fewer groups than workers."""
    for workers in (2, 4) if name in ("Qwen3", "Phi-3") else (2,):
        on_threads(workers, steps_as_one_process, name, "own")


@pytest.mark.parametrize("workers", [3, 4])
def test_heads_that_do_not_divide(workers: int) -> None:
    for name in "GPT-2", "T5":
        on_threads(workers, steps_as_one_process, name, "tensor")


@needs_mpi
@pytest.mark.parametrize(("name", "kind"), [("Qwen3", "sequence"), ("GPT-2", "tensor")])
def test_steps_on_ranks(name: str, kind: str) -> None:
    on_ranks(2, steps_as_one_process, name, kind)


@pytest.mark.parametrize(("name", "kind"), [("Qwen3", "sequence"), *FUSED])
def test_check_agrees(name: str, kind: str) -> None:
    on_threads(2, agrees_by_check, name, kind)


@pytest.mark.parametrize(("name", "kind"), [("Qwen3", "tensor"), ("GPT-2", "tensor")])
def test_compiled_at_the_first_call(name: str, kind: str) -> None:
    on_threads(2, compiles_at_the_first_call, name, kind)


@pytest.mark.parametrize(("name", "kind"), FUSED)
def test_checkpoints_of_the_model(name: str, kind: str) -> None:
    on_threads(2, computes_again, name, kind)


@pytest.mark.parametrize(("name", "kind"), FUSED)
def test_folders_of_fused_projections(name: str, kind: str) -> None:
    with folder() as path:
        on_threads(2, goes_on_elsewhere, name, path, True)
        on_threads(4, goes_on_elsewhere, name, path, False)


def test_a_model_without_a_plan() -> None:
    from linop.strategies import Mesh, tp_plan
    from support.models.exact import model

    def program(backend: object) -> None:
        tp_plan(model("GPT-2"), Mesh(tp=-1)["tp"])

    with pytest.raises(linop.LinopError, match="GPT2LMHeadModel has no plan of its own"):
        linop.launch(program, 2)
