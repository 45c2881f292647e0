"""Many programs of mpi4py, checked in one job after the other: torch is imported once."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.job_programs import mpiexec

_PARTS = "mpi_common", "steps", "exchanges", "pairs"
VERSIONS = "right", "wrong"
_TEXT = """
import sys
sys.path.insert(0, {tests!r})
from support.checked_programs import check
check({targets!r}, {path!r})
"""


def check(targets: Sequence[str], path: str) -> None:
    """Check programs, both versions, on the ranks of this job; rank 0 writes the reports."""
    from linop.testing import check_mpi

    found = []
    for target in targets:
        for version in VERSIONS:
            os.environ["CASE"] = version
            for name in _PARTS:  # read the version when they are imported
                sys.modules.pop(name, None)
            found.append(check_mpi(target, seconds=150))
    if found[0] is not None:
        Path(path).write_bytes(pickle.dumps(found))


def reports(targets: Sequence[str], ranks: int, folder: Path) -> dict[tuple[str, str], Any]:
    """The reports of programs by their names and versions."""
    tests, path = str(Path(__file__).parents[1]), folder / f"reports{ranks}"
    text = _TEXT.format(tests=tests, targets=list(targets), path=str(path))
    done = mpiexec(ranks, folder / "checks.py", text, 250.0)
    assert done.returncode == 0, done
    names = [(target.rpartition(":")[2], v) for target in targets for v in VERSIONS]
    return dict(zip(names, pickle.loads(path.read_bytes()), strict=True))
