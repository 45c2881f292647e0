"""The suite's own modules, importable from every test and from the jobs that tests start.

pytest runs with ``--import-mode=importlib``, which puts no folder on the path; this puts there the
suite's folder alone, never the root, whose folder ``linop/`` would hide an installed package.
"""

import gc
import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

from linop.testing.plugin import IDLE
from linop.testing.workers import jobs

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)

COMMON = {
    "deadline": None,  # threads and subprocesses: times vary with the machine's load
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
    # `explain` runs a failing example many times more, and says little about operators.
    "phases": (Phase.explicit, Phase.reuse, Phase.generate, Phase.target, Phase.shrink),
}
settings.register_profile("default", max_examples=25, print_blob=True, **COMMON)
# For a first look at many failures, which are found ten times faster than they are made short.
as_found = {**COMMON, "phases": (Phase.explicit, Phase.generate)}
settings.register_profile("unshrunk", max_examples=25, print_blob=True, **as_found)
# While one works (`tox run -e quick`).
settings.register_profile("quick", max_examples=5, print_blob=True, **COMMON)
settings.register_profile("thorough", max_examples=500, print_blob=True, **COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


from support import preloaded  # noqa: E402  # found now

jobs.PYTHON = preloaded.python


def pytest_report_header() -> str:
    """How to repeat the draws of this run."""
    from support.draws import SEED

    if SEED is None:
        return "properties: Hypothesis chooses the seeds; HYPOTHESIS_SEED=… sets one for all"
    return f"properties: HYPOTHESIS_SEED={SEED} (set it to repeat these draws)"


HEAVY = frozenset({"torch", "torch._dynamo", "transformers"})
"""Modules of hundreds of thousands of objects, which tests import."""
_frozen: set[str] = set()


def pytest_collection_finish() -> None:
    """Let collections of garbage not visit all that was imported and collected."""
    gc.collect()
    gc.freeze()
    # A full collection comes after a quarter of what the last one left: of nothing now, and not of
    # a million frozen objects, while tensors in cycles would fill the memory.
    gc.collect()


def pytest_runtest_logfinish() -> None:
    """Nor what a test has imported. Jobs without work end, as those of MPI do."""
    if running := sys.modules.get("support.torchrun"):
        running.close_idle(IDLE)
    if new := HEAVY.intersection(sys.modules) - _frozen:
        _frozen.update(new)
        pytest_collection_finish()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Seed the properties, and refuse those that draw too few examples. Under xdist, put tests on
    ranks first, those with torch after the others. The first worker then starts nearly all jobs of
    ranks, whose imports take longer than most tests, while the second one runs tests on threads;
    and most jobs do not have torch while they do without."""
    from support.draws import seeded, too_few

    wrong = []
    for item in items:
        if test := getattr(item, "obj", None):
            seeded(test)
            if words := too_few(test, _on_ranks(item)):
                wrong.append(f"{item.nodeid} {words}")
    if wrong:
        raise pytest.UsageError("\n".join(wrong))
    if hasattr(config, "workerinput"):
        items.sort(key=_order)


def _order(item: Any) -> tuple[bool, bool]:
    """Sorting key: False before True."""
    on_ranks = _on_ranks(item)
    return not on_ranks, _names(item.path, "torch") == on_ranks


def _on_ranks(item: pytest.Item) -> bool:
    from support.requirements import needs_mpi

    return needs_mpi.mark in item.iter_markers() or _names(item.path, "on_torchrun")


@cache
def _names(file: Path, name: str) -> bool:
    return name in file.read_text()


@pytest.fixture(autouse=True)
def torch_default_dtype() -> Iterator[None]:
    """Programs of other people set it where they are imported; the next test has its own."""
    before = torch.get_default_dtype() if (torch := sys.modules.get("torch")) else None
    yield
    if torch := sys.modules.get("torch"):
        torch.set_default_dtype(before or torch.float32)
