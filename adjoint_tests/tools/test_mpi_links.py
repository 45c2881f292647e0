"""``linop doctor --mpi``: links that are measured, and bindings that are bad."""

from __future__ import annotations

import re
import sys

import pytest

from linop.backends.mpi import mpirun
from linop.tools.mpi_links import Rank, faults
from support.job_programs import ENVIRONMENT
from support.requirements import needs_mpi


@needs_mpi
@pytest.mark.timeout(120)
def test_the_link_of_this_machine_is_measured() -> None:
    command = [sys.executable, "-m", "linop", "doctor", "--mpi"]
    job = mpirun.mpiexec(3, command, timeout=60, env=ENVIRONMENT | {"NO_COLOR": "1"})
    assert job.returncode == 0, job.stderr
    (row,) = (line for line in job.stdout.splitlines() if "│ 0, 1 " in line)
    latency, bandwidth = map(float, re.findall(r"[0-9.]+(?:e[+-]?[0-9]+)?", row)[-2:])
    assert 0 < latency < 1e6
    assert bandwidth > 0


def ranks(*cores: str, machine: int = 0, many: int = 4) -> list[Rank]:
    return [Rank(machine, f"host{machine}", frozenset(map(int, one)), many) for one in cores]


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (ranks("0123", "0123"), []),
        (ranks("0", "1"), []),
        (ranks("0"), []),
        (ranks("", ""), []),
        (ranks("0", "0"), ["ranks 0, 1 on host0 are bound to core 0 of 4"]),
        (ranks("01", "01", "01"), ["ranks 0, 1, 2 on host0 are bound to cores 0, 1 of 4"]),
        (ranks("01", "01", "01", many=2), ["ranks 0, 1, 2 on host0 share 2 cores"]),
        (ranks("0", "1") + ranks("3", "3", machine=2), ["ranks 2, 3 on host2 are bound to core 3"]),
    ],
)
def test_bad_bindings_are_named(found: list[Rank], words: list[str]) -> None:
    said = faults(found)
    assert len(said) == len(words)
    assert all(one.startswith(wanted) for one, wanted in zip(said, words, strict=True))
