"""Records of a parallel program: elements in memory, errors and places of ranks."""

from __future__ import annotations

import importlib.util
import signal
from pathlib import Path

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch

from linop.testing.parallel.recording.failures import failure, where
from linop.testing.parallel.recording.gradients import Gradients
from linop.testing.parallel.recording.shadows import Shadows
from linop.testing.parallel.recording.tensors import has_gaps

STACK = """Thread 0x00007fd8388296c0 (most recent call first):
  File "{linop}/rank.py", line 31 in _ends_with_its_parent

Current thread 0x00007fd8592afb80 (most recent call first):
  File "{torch}/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "{program}", line 2 in forward
  File "{program}", line 1 in step
"""


def stack(tmp_path: Path, name: str) -> str:
    """The stacks of a rank that waits in a line of a program."""
    program = tmp_path / name
    program.write_text("step()\n    dist.all_reduce(y)\n")
    folders = {"linop": Path(failure.__code__.co_filename).parent, "torch": torch.__path__[0]}
    return STACK.format(program=program, **folders)


def test_the_line_at_which_a_rank_waits(tmp_path: Path) -> None:
    assert where(stack(tmp_path, "model.py")) == "model.py:2: dist.all_reduce(y)"
    assert where("no stack") == ""


def test_a_hang_says_first_where_ranks_are(tmp_path: Path) -> None:
    for rank, name in enumerate(("one.py", "two.py")):
        (tmp_path / f"{rank}.stack").write_text(stack(tmp_path, name))
    lines = str(failure(tmp_path, 2, 5.0)).splitlines()
    assert lines[1] == "rank 0 is at one.py:2: dist.all_reduce(y)"
    assert lines[2].startswith("rank 1 is at two.py:2")
    assert "_ends_with_its_parent" not in "\n".join(lines)


def test_a_rank_that_is_killed_is_named_before_those_that_lose_it(tmp_path: Path) -> None:
    (tmp_path / "0.error").write_text(
        "Traceback (most recent call last):\nConnection closed by peer"
    )
    lines = str(failure(tmp_path, 2, 5.0, {0: 1, 1: -signal.SIGKILL})).splitlines()
    assert lines[0] == "rank 1 of the program failed:"
    assert "by signal 9" in lines[1]
    assert lines[2:] == ["rank 0 lost its connection to it"]


@pytest.mark.parametrize("raw", [False, True])
def test_gloo_moves_memory(raw: bool) -> None:
    """Of a transposed tensor its elements in the order of memory, not in that of its indices."""
    x = torch.zeros(2, 3)
    shadows = Shadows(0, False, [x])
    shadows.collective(0, [x.t()], [torch.zeros(3, 2)], raw)
    (moved,) = shadows.lifted.moved
    assert moved.given[0].tolist() == ([1, 2, 3, 4, 5, 6] if raw else [1, 4, 2, 5, 3, 6])


def test_tensors_with_gaps() -> None:
    x = torch.zeros(4, 6)
    assert has_gaps(x[:, ::2]) and has_gaps(x[:, :3])
    assert not has_gaps(x) and not has_gaps(x.t()) and not has_gaps(x[1:])


def test_gradients_in_a_bucket() -> None:
    """A collective of a bucket moves the gradients in it; one of norms moves none."""
    found = Gradients()
    found.parameters = {name: torch.nn.Parameter(torch.zeros(3)) for name in "ab"}
    for one in found.parameters.values():
        one.grad = torch.ones(3)
    found.find()
    a, b = (one.grad for one in found.parameters.values())
    assert a is not None and b is not None
    flat, norm = torch.cat([a, b]), a.norm()
    found.used("cat", "1: cat", [a, b], [flat])
    found.used("norm", "2: norm", [a], [norm])
    half = torch.zeros(3)
    assert found.moved([flat], [half], "3: reduce_scatter") == ("a", "b")
    found.used("__itruediv__", "4: half /= 2", [half], [half])
    assert found.moved([norm], [norm], "5: all_reduce") == ()
    assert found.moved([a], [a], "6: all_reduce") == ()
    assert list(found.passed["b"]) == ["1: cat", "3: reduce_scatter", "4: half /= 2"]
    assert found.name([a]) == "a"
