"""benchmarks/inverse/tutorials: programs that are read as text."""

from __future__ import annotations

import sys
from pathlib import Path

_path = sys.path[:]  # as in test_published_runs
sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks.inverse.tutorials.programs import Program  # noqa: E402

sys.path[:] = _path

SCRIPT = '''
"""A tutorial."""
import numpy as np
from matplotlib import pyplot as plt
plt.close("all")
n = 3
###########
x = np.arange(n)  # a model
def solve(x, niter, tol, show): return (x * niter, tol, show)
found_dist = solve(x, niter=100, tol=0, show=True)[0]
found = found_dist + 1
if rank == 0:
    plt.plot(found)
'''
FUNCTION = '''
"""The same."""
import numpy as np

def solve(x, niter, tol): return x * niter

def main(backend, n=2, niter=7):
    """A function."""
    x = np.arange(n) + backend
    found = solve(x, niter=niter, tol=0)
    return found.sum()

if __name__ == "__main__":
    print(main(0))
'''


def test_a_script(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    program = Program(tmp_path / "script.py", ["found_dist"])
    program.prepare()
    assert program.solve("found_dist", niter=2, show=False).tolist() == [0, 2, 4]
    assert "found" not in program.namespace  # which needs a solution, and is for a picture
    program.prepare(n=5)
    assert program.solve("found_dist", niter=1).tolist() == [0, 1, 2, 3, 4]
    assert program.lines() == 7


def test_a_function(tmp_path: Path) -> None:
    (tmp_path / "function.py").write_text(FUNCTION)
    program = Program(tmp_path / "function.py", ["found"], "main")
    program.prepare(backend=10)
    assert program.solve("found").tolist() == [70, 77]
    assert program.solve("found", niter=2).tolist() == [20, 22]
    program.prepare(backend=10, n=1)
    assert program.solve("found", niter=1).tolist() == [10]
    assert program.lines() == 9
