"""Debug mode proves plans when they are compiled: as lowered, and as rewritten for collectives."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import linop
from linop import Partition, TensorSpace
from linop.backends import Backend
from linop.backends.engine import proving
from linop.normal_form.stages import Stages
from linop.planning.lowering import lower
from linop.planning.passes import Options
from linop.planning.placement import Placement
from linop.planning.plan import LoweredPlan, Put
from linop.planning.stretching import stretched
from linop.planning.verification.plan_errors import UnfinishedError, WrongTransferError
from support.contracts.plans import total
from support.job_programs import mpiexec
from support.requirements import needs_mpi


def unfinished(stages: Stages, worker: int, placement: Placement | None = None) -> LoweredPlan:
    """A plan without its last step."""
    plan = lower(stages, worker, placement)
    return replace(plan, steps=plan.steps[:-1])


def compiled(backend: Backend) -> None:
    plan = total(2, 3).compile(backend)
    assert plan.H is not None


@pytest.mark.parametrize("debug", ["0", "1"])
def test_threads_prove_in_debug_mode(debug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINOP_DEBUG", debug)
    linop.launch(compiled, workers=2)
    compiled(linop.backends.get("threads"))
    monkeypatch.setattr("linop.planning.stretching.lower", unfinished)
    monkeypatch.setattr("linop.backends.threads.backend.lower", unfinished)
    for compile_it in (
        lambda: linop.launch(compiled, workers=2),
        lambda: compiled(linop.backends.get("threads")),
    ):
        if debug == "0":
            compile_it()
        else:
            with pytest.raises(UnfinishedError, match="no advance follows"):
                compile_it()


def test_the_adjoint_is_proven_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINOP_DEBUG", "1")

    compiled = threading.Barrier(2)

    def main(backend: Backend) -> None:
        plan = linop.gather(TensorSpace((4,), Partition((2,)))).compile(backend)
        compiled.wait()
        monkeypatch.setattr("linop.planning.stretching.lower", unfinished)
        with pytest.raises(UnfinishedError):
            plan.H  # noqa: B018

    linop.launch(main, workers=2)


def test_plans_of_many_workers_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proving, "MOST", 2)
    proving.prove(total(3, 3), unfinished, Options())
    with pytest.raises(UnfinishedError):
        proving.prove(total(2, 3), unfinished, Options())


@pytest.mark.parametrize("debug", ["0", "1"])
def test_a_plan_made_from_one_for_another_batch_size_is_proven(
    debug: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan that runs is the one proven, on every worker, not one lowered for the proof."""

    def doubled(plan: LoweredPlan, *others: Any) -> LoweredPlan:
        """A plan whose last put writes twice what came, but on the first worker."""
        made = stretched(plan, *others)
        if not made.worker:
            return made
        last = max(k for k, step in enumerate(made.steps) if isinstance(step, Put))
        wrong = replace(made.steps[last], coefficient=2)
        return replace(made, steps=(*made.steps[:last], wrong, *made.steps[last + 1 :]))

    def main(backend: Backend) -> list[str]:
        said = []
        for batch in (2, 3):
            X = TensorSpace((batch, 8), Partition((2,)), axes=[1])
            try:
                linop.halo_exchange(X, (1, 3)).compile(backend)
            except WrongTransferError as error:
                said.append(str(error))
        return said

    monkeypatch.setenv("LINOP_DEBUG", debug)
    monkeypatch.setattr("linop.planning.stretching.stretched", doubled)
    one, other = linop.launch(main, workers=2)
    assert one == other
    assert len(one) == int(debug)
    assert all(text.startswith("worker 1, stage 0") for text in one)


@needs_mpi
def test_what_collectives_make_of_a_plan_is_proven(tmp_path: Path) -> None:
    """Parts that are given in another order than that of the group."""
    text = """
from linop.planning import collective_selection
from linop.planning.verification.plan_errors import WrongTransferError

backend = linop.backends.get("mpi", debug=True, collectives=True)
op = linop.all_gather(TensorSpace((4,), Partition((2,)))).H
first = 4 * backend.worker
assert op.compile(backend)(np.arange(4.0)).tolist() == [first, first + 2]
gives = collective_selection._CollectiveStage.gives
collective_selection._CollectiveStage.gives = lambda self: gives(self)[::-1]
try:
    op.compile(backend)
except WrongTransferError as error:
    print(str(error))
"""
    job = mpiexec(2, tmp_path / "program.py", text, LINOP_WINDOWS="0")
    assert job.returncode == 0, job.stderr
    said = job.stdout.splitlines()
    assert len(said) == 2
    assert said[0] == said[1]
    assert said[0].startswith(
        "worker 0, stage 0, x@0: x@0[0:2] + x@1[0:2] expected, x@0[2:4] + x@1"
    )
