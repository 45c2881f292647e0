"""Output of programs on ranks, as the documentation shows it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.requirements import needs_mpi

DOCS = Path(__file__).resolve().parents[2] / "docs"
WRONG = """    if left >= 0:
        comm.Sendrecv(y[:1], left, recvbuf=x[:1], source=left)
    if right < comm.size:
        comm.Sendrecv(y[-1:], right, recvbuf=x[-1:], source=right)
"""
RIGHT = """    ghost = np.empty(1)
    if left >= 0:
        comm.Sendrecv(y[:1], left, recvbuf=ghost, source=left)
        x[:1] += ghost
    if right < comm.size:
        comm.Sendrecv(y[-1:], right, recvbuf=ghost, source=right)
        x[-1:] += ghost
"""


def run_pytest(folder: Path) -> subprocess.CompletedProcess[str]:
    """pytest on the page's files, in a folder."""
    (folder / "test_ghosts.py").write_text((DOCS / "ghosts" / "checking.py").read_text())
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "linop.testing.plugin", "-p", "no:cacheprovider"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        check=False,
        text=True,
        timeout=200,
    )


@needs_mpi
@pytest.mark.timeout(300)
def test_the_wrong_adjoint_of_the_page_on_testing(tmp_path: Path) -> None:
    ghosts = (DOCS / "ghosts" / "ghosts.py").read_text()
    (tmp_path / "ghosts.py").write_text(ghosts)
    failed = run_pytest(tmp_path)
    assert failed.returncode == 1, failed.stdout + failed.stderr
    page = (DOCS / "testing.md").read_text()
    for line in (
        "test_backward_is_the_adjoint(n=1) failed on 2 ranks: ranks 0, 1 failed",
        "worst:     from x0[0] (worker 0) to y0[1] (worker 0): F has 1, the conjugate transpose of "
        "the adjoint has 0",
        "    n=1,\n)\nworkers=2",
    ):
        assert line in page
        assert line in failed.stdout, failed.stdout

    assert WRONG in ghosts
    (tmp_path / "ghosts.py").write_text(ghosts.replace(WRONG, RIGHT))
    mended = run_pytest(tmp_path)
    assert mended.returncode == 0, mended.stdout + mended.stderr
    assert "examples on mpi" in mended.stdout
