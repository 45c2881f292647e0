"""The end of a program whose workers were ended in backward."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

PROGRAM = """
import time, torch, linop

class Slow:
    def __call__(self, *gradients): pass
    def __del__(self): time.sleep(0.5)

def fail(gradient):
    time.sleep(0.2)
    raise ValueError("second")

def program(backend):
    if backend.worker == 0:
        raise ValueError("first")
    x = torch.ones(2, requires_grad=True)
    one, two = 2 * x, 3 * x
    one.grad_fn.register_hook(Slow())
    two.register_hook(fail)
    (one + two).sum().backward()

try:
    linop.launch(program, 2)
except ValueError as error:
    print(error)
"""


def test_what_a_failed_backward_left_is_freed_before_the_end() -> None:
    """torch frees it after the thread's Python program, for which it takes the GIL."""
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "first\n"), done.stderr
