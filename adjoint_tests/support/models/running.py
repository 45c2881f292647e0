"""A case on threads, or on the ranks of a job, beside its twin: a verdict."""

from __future__ import annotations

import json
import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import linop
from linop.backends.engine.base import Backend
from linop.errors import LinopError
from linop.testing.workers.jobs import job
from support.models.cases import Case, start
from support.models.strategies import STRATEGIES, Unfit, in_stages
from support.models.twin import Seen, Twin, alone, faults
from support.workers import on_mpi

WATCH = 90.0
"""Seconds of a case on ranks."""
Said = dict[str, Any]
"""A worker's words: its faults, or the error that it got."""


@dataclass(frozen=True)
class Verdict:
    """The end of a case: "right", "refused", "wrong", "raw" (an error that is none of linop's), or
    "unfit"."""

    kind: str
    text: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}" if self.text else self.kind


def on_threads(case: Case) -> Verdict:
    """The verdict of a case whose workers are threads."""
    torch.set_num_threads(1)
    options: dict[str, Any] = {}
    try:
        twin = _alone(case)
        start(case)
        if "pp" in case.mesh:
            options["stages"] = in_stages(case)
    except Unfit as error:
        return Verdict("unfit", str(error))
    except LinopError as error:
        return Verdict("refused", _short(error))
    return verdict(case, _launched(case, twin, options))


def _alone(case: Case) -> Twin:
    """The run in one process.

    Raises:
        Unfit: it fails there, as a batch norm of one value does.
    """
    try:
        return alone(case)
    except Exception as error:
        raise Unfit(f"one process has {type(error).__name__}: {error}") from error


def _launched(case: Case, twin: Twin, options: Mapping[str, Any]) -> list[Said]:
    """The words of each thread; of those that were ended, that they were."""
    said: dict[int, Said] = {}

    def program(backend: Backend) -> None:
        said[backend.worker or 0] = worker(backend, case, twin, options)

    try:
        linop.launch(program, case.workers, "threads")
    except LinopError as error:  # one has got an error that the others have not
        for k in range(case.workers):
            said.setdefault(k, {"raw": f"on worker {k} alone: {_short(error)}"})
    return [said[k] for k in range(case.workers)]


def on_ranks(case: Case) -> Verdict:
    """The verdict of a case whose workers are ranks of a job."""
    return _of_job(case, _on_rank)


def on_torch(case: Case) -> Verdict:
    """The verdict of torch's own strategy for a case, on ranks over gloo."""
    return _of_job(case, _on_gloo)


def _of_job(case: Case, program: Callable[..., None]) -> Verdict:
    with tempfile.TemporaryDirectory() as folder:
        outcome = job(case.workers).ask(str(case), program, (case, folder), WATCH)
        files = [Path(folder, str(rank)) for rank in range(case.workers)]
        if all(file.exists() for file in files):
            return verdict(case, [json.loads(file.read_text()) for file in files])
        texts = [answer.text for answer in outcome.answers.values() if answer is not None]
        return Verdict("raw", f"ranks died or stood still: {' '.join(texts)[-500:]}")


def _on_rank(comm: Any, case: Case, folder: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    backend = on_mpi(comm)
    with linop.backends.use(backend):
        try:
            said = worker(backend, case, _alone(case), {})
        except Unfit as error:
            said = {"unfit": str(error)}
    Path(folder, str(comm.rank)).write_text(json.dumps(said))


def worker(backend: Backend, case: Case, twin: Twin, options: Mapping[str, Any]) -> Said:
    """Run a case on one worker."""
    strategy, _ = STRATEGIES[case.strategy]
    return _attempt(case, twin, lambda: strategy(backend, case, **options))


def _attempt(case: Case, twin: Twin, run: Callable[[], Seen]) -> Said:
    try:
        seen = run()
    except Unfit as error:
        return {"unfit": str(error)}
    except LinopError as error:
        return {"refused": f"{type(error).__name__}: {_short(error)}"}
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        at = f"{Path(where.filename).name}:{where.lineno}"
        return {"raw": f"{type(error).__name__}: {_short(error)} (at {at})"}
    return {"faults": faults(case, twin, seen), "losses": seen.losses, "replica": seen.replica}


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) < 400 else f"{text[:200]} … {text[-190:]}"


def verdict(case: Case, said: list[Said]) -> Verdict:
    """The findings of all workers."""
    for kind in "unfit", "raw", "refused":
        for one in said:
            if kind in one:
                return Verdict(kind, one[kind])
    found = [fault for one in said for fault in one["faults"]]
    losses: dict[int, list[float]] = {}
    for one in said:
        known = losses.setdefault(one["replica"], one["losses"])
        for step, (a, b) in enumerate(zip(known, one["losses"], strict=False)):
            if not abs(a - b) <= case.family.tolerance * max(1.0, abs(a)):
                found.append(f"loss of step {step}: {a:.9g} and {b:.9g} on workers of one model")
    return Verdict("wrong", "; ".join(dict.fromkeys(found))) if found else Verdict("right")


def _on_gloo(comm: Any, case: Case, folder: str) -> None:
    from support.models.peers import PEERS, gloo

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with gloo(comm, case.mesh) as mesh:
        said = _attempt(case, alone(case), lambda: PEERS[case.strategy](mesh, case))
        Path(folder, str(comm.rank)).write_text(json.dumps(said))
