"""Pairs of a forward function and its adjoint over mpi4py: right ones pass, and what is wrong with
others is named."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from linop.backends.mpi.mpirun import mpiexec
from linop.errors import ArgumentError, BackendError
from linop.testing.parallel.mpi.check import check_mpi
from linop.testing.parallel.mpi.report import PairReport
from support import mpi_programs
from support.checked_programs import reports
from support.job_programs import ENVIRONMENT
from support.requirements import needs_mpi

pytestmark = [needs_mpi, pytest.mark.timeout(240)]
FILE = Path(mpi_programs.__file__).with_name("pairs.py")
RANKS = {"Exchanged": 3, "Rows": 4, "Scattered": 3, "Messages": 3, "Columns": 3, "Gathered": 3}
WORDS = {
    "MissingSum": (
        "the adjoint is an all-reduce over ranks 0, 1; none ran",
        "terms of other ranks",
    ),
    "ReplicatedSum": ("all-reduce over ranks 0, 1 (pairs.py:", "of the adjoint is too many"),
    "Broadcast": ("broadcast from rank 0", "the adjoint is a sum-reduce to rank 0", "none ran"),
    "Roots": ("the adjoint is a sum-reduce to rank 0", "a sum-reduce to rank 1", "ran instead"),
    "Overwrites": ("rank 0: forward() changes its argument: element [0]",),
    "Halo": ("the own term of a rank is lost, as in x[2, 0] of rank 0", "added"),
    "Gathered": ("the adjoint is a reduce-scatter over ranks 0, 1, 2; none ran",),
    "GatheredAndSummed": ("all-reduce over ranks 0, 1 (pairs.py:", "is too many", "2 times"),
    "Exchanged": ("rank 0 gets 1, 0, 2 elements", "it sends back 1, 2, 0"),
    "Rows": ("the adjoint is an all-reduce over ranks 0, 1;", "all-reduce over ranks 0, 2"),
    "Scattered": ("the elements arrive in other places", "of rank 1"),
    "Messages": ("adjoint() is 2 times the transpose of forward()",),
    "Columns": ("from y[0, 0] of rank 1 to x[0, 3] of rank 0, adjoint() has 0",),
    "Neighbours": ("messages 0 to 1, 1 to 0 (pairs.py:", "from y[0] of rank 1 to x[0] of rank 0"),
    "Turned": ("adjoint() is -1 times the conjugate transpose of forward()", "0-1j"),
    "Large": ("the adjoint is a sum-reduce to rank 0", "none ran", "y[0] of rank 1 to x[0]"),
    "LargeSums": ("the adjoint is a sum-reduce to rank 0", "none ran", "y1["),
}
UNFOLLOWED = {"Turned", "Scattered", "LargeSums"}
"""Programs with complex factors, with real parts of complex arrays, with running sums."""


def report(name: str, case: str, monkeypatch: pytest.MonkeyPatch) -> PairReport:
    monkeypatch.setenv("CASE", case)
    found = check_mpi(f"{FILE}:{name}", RANKS.get(name, 2), seconds=100)
    assert isinstance(found, PairReport)
    return found


@pytest.mark.parametrize("ranks", sorted({2, *RANKS.values()}))
def test_right_pairs_pass_and_wrong_ones_are_named(ranks: int, tmp_path: Path) -> None:
    names = [name for name in WORDS if RANKS.get(name, 2) == ranks]
    found = reports([f"{FILE}:{name}" for name in names], ranks, tmp_path)
    for name in names:
        right, wrong = found[name, "right"], found[name, "wrong"]
        assert right, right
        assert right.trials[0].passed and not right.operators and not right.faults
        assert not wrong
        for words in WORDS[name]:
            assert words in str(wrong)
        is_followed = name not in UNFOLLOWED and not right.faults
        for one in (right, wrong) if wrong.trials else ():
            assert ("lifted from the calls that ran" in one.evidence) is is_followed, one
            assert bool(one.trials[0].wanted) is (name != "LargeSums"), one


def test_the_report_says_between_which_spaces(monkeypatch: pytest.MonkeyPatch) -> None:
    found = report("ReplicatedSum", "right", monkeypatch)
    first = found.trials[0]
    assert (first.domain, first.codomain) == ("each rank's own", "replicated over ranks 0, 1")
    data = found.as_dict()
    assert data["passed"] and data["trials"][0]["codomain"] == first.codomain
    assert data["forward"][0]["text"] == "all-reduce over ranks 0, 1"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("np.abs(x)", "forward() is not linear"),
        ("x / 0", "forward() returns numbers that are not finite"),
    ],
)
def test_functions_that_are_no_linear_maps_are_faults(
    tmp_path: Path, body: str, words: str
) -> None:
    file = tmp_path / "function.py"
    file.write_text(
        f"import numpy as np\ndef forward(x, comm): return {body}\nadjoint = forward\n"
        "def domain(rank, world): return 3\ncodomain = domain\n"
    )
    found = check_mpi(file, 2, seconds=60)
    assert isinstance(found, PairReport)
    assert not found and words in found.faults[0]


def test_what_ranks_without_a_result_return_is_not_looked_at(tmp_path: Path) -> None:
    """A reduction does not write the array of other ranks than its root."""
    file = tmp_path / "root.py"
    file.write_text(
        "import numpy as np\nfrom mpi4py import MPI\n"
        "def domain(rank, world): return 3\n"
        "def codomain(rank, world): return 3 if rank == 0 else None\n"
        "def forward(x, comm):\n"
        "    y = np.full(3, np.nan)\n"
        "    comm.Reduce(x, y, op=MPI.SUM, root=0)\n"
        "    return y\n"
        "def adjoint(y, comm):\n"
        "    x = np.array(y) if comm.rank == 0 else np.empty(3)\n"
        "    comm.Bcast(x, root=0)\n"
        "    return x\n"
    )
    found = check_mpi(file, 2, seconds=60)
    assert found, found


SCAN = """
import numpy as np
def domain(rank, world): return 3
codomain = domain
def forward(x, comm):
    before = np.zeros(1)
    comm.Exscan(np.array([x.sum()]), before)
    return np.cumsum(x) + (before if comm.rank else 0)
def adjoint(y, comm):
    sums = np.zeros(comm.size)
    comm.Allgather(np.array([y.sum()]), sums)
    return np.cumsum(y[::-1])[::-1] + {}
"""


@pytest.mark.parametrize(
    ("behind", "words"),
    [
        ("sums[comm.rank + 1 :].sum()", ""),
        ("sums[comm.rank :].sum()", "of rank 0, adjoint() has 2 and the transpose"),
        ("2 * sums[comm.rank + 1 :].sum()", "adjoint() has 2 and the transpose"),
        ("sums.sum()", "all-gather over ranks 0, 1 (scan.py"),
    ],
)
def test_movements_are_not_blamed_for_wrong_numbers(
    tmp_path: Path, behind: str, words: str
) -> None:
    """An offset or a factor is wrong where all elements arrive, and no others."""
    file = tmp_path / "scan.py"
    file.write_text(SCAN.format(behind))
    found = check_mpi(file, 2, seconds=60)
    assert isinstance(found, PairReport)
    assert bool(found) is not bool(words), found
    assert words in str(found)
    assert bool(found.operators) is (behind == "sums.sum()")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("x[:2].copy()", r"forward\(\) on rank 0 returns shape \(2,\); an array of shape \(3,\)"),
        ("1j * x", r"rank 0 returns complex128; float64 expected"),
        ("None", r"rank 0 returns None; an array of shape \(3,\) expected"),
    ],
)
def test_functions_that_return_something_else_are_errors(
    tmp_path: Path, body: str, words: str
) -> None:
    file = tmp_path / "returns.py"
    file.write_text(
        f"import numpy as np\ndef forward(x, comm): return {body}\nadjoint = forward\n"
        "def domain(rank, world): return 3\ncodomain = domain\n"
    )
    with pytest.raises(ArgumentError, match=words):
        check_mpi(file, 2, seconds=60)


@pytest.mark.parametrize(("parts", "fault"), [("real", ""), ("real + y.imag", "imaginary")])
def test_real_and_complex_sides(tmp_path: Path, parts: str, fault: str) -> None:
    file = tmp_path / "mixed.py"
    file.write_text(
        "import numpy as np\ndef forward(x, comm): return x + 0j\n"
        f"def adjoint(y, comm): return y.{parts}\n"
        "def domain(rank, world): return 3\n"
        "def codomain(rank, world): return 3, 'complex128'\n"
    )
    found = check_mpi(file, 2, seconds=60)
    assert isinstance(found, PairReport)
    assert bool(found) is not bool(fault)
    assert fault in str(found.faults)


def test_a_job_that_is_running_is_checked() -> None:
    program = (
        "import os\nfrom linop.testing.parallel.mpi.check import check_mpi\n"
        f"report = check_mpi({f'{FILE}:Halo'!r})\n"
        "os.write(1, b'passed ' if report else b'None ')\n"
    )
    done = mpiexec(3, [sys.executable, "-c", program], timeout=100, env=ENVIRONMENT)
    assert sorted(done.stdout.split()) == ["None", "None", "passed"], done


def test_a_pair_that_waits_ends_with_all_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CASE", "wrong")
    with pytest.raises(BackendError, match=r"(?s)rank 0:.*rank 1:.*pairs.py.* in forward"):
        check_mpi(f"{FILE}:Waits", 2, seconds=15)


def test_errors_say_what_is_missing(tmp_path: Path) -> None:
    file = tmp_path / "half.py"
    file.write_text("def forward(x, comm): ...\ndef adjoint(y, comm): ...\n")
    with pytest.raises(ArgumentError, match="no function domain, codomain"):
        check_mpi(file, 2, seconds=60)
    with pytest.raises(ArgumentError, match="no file"):
        check_mpi(tmp_path / "none.py", 2)
    file.write_text(
        "DOMAIN = 'half'\nforward = adjoint = print\ndomain = codomain = lambda rank, world: 3\n"
    )
    with pytest.raises(ArgumentError, match="DOMAIN is 'half'"):
        check_mpi(file, 2, seconds=60)


def test_an_exception_of_the_program_is_told(tmp_path: Path) -> None:
    file = tmp_path / "raises.py"
    file.write_text(
        "def forward(x, comm):\n    raise KeyError('planted')\n"
        "adjoint = forward\ndef domain(rank, world): return 3\ncodomain = domain\n"
    )
    with pytest.raises(BackendError, match="planted"):
        check_mpi(file, 2, seconds=60)
