"""Pairs of mpi4py that really run, drawn, with parts of uneven sizes: all are followed and lifted,
and one passes exactly if inner products of whole numbers say that it is a pair."""

from __future__ import annotations

import pickle
from collections import Counter
from pathlib import Path

import pytest

from support.job_programs import mpiexec
from support.requirements import needs_mpi

pytestmark = [needs_mpi, pytest.mark.timeout(240)]
SEEDS, RANKS = 120, 3
TEXT = """
import sys
sys.path.insert(0, {tests!r})
from support.mpi_programs.drawn import check
check({seeds}, {path!r})
"""


def test_drawn_pairs(tmp_path: Path) -> None:
    tests, path = str(Path(__file__).parents[1]), tmp_path / "found"
    text = TEXT.format(tests=tests, seeds=SEEDS, path=str(path))
    done = mpiexec(RANKS, tmp_path / "checks.py", text, 200.0)
    assert done.returncode == 0, done
    verdicts: Counter[bool] = Counter()
    for drawn, fault, report, is_pair in pickle.loads(path.read_bytes()):
        assert report.passed is bool(is_pair), (drawn, str(report))
        assert is_pair or fault, drawn
        assert report.evidence.endswith("exactly: lifted from the calls that ran"), (drawn, report)
        assert report.operator and report.adjoint_operator and report.trials[0].wanted
        verdicts[report.passed] += 1
    assert min(verdicts[True], verdicts[False]) > 30, verdicts
