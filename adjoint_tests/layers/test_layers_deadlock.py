"""Layers that one rank calls, and another does not: the job ends within seconds, and every rank
says the same, in the network's words."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from support.job_programs import mpiexec
from support.requirements import needs_mpi

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

pytestmark = [needs_mpi, pytest.mark.timeout(200)]

PROGRAM = """
import torch
from linop import layers
from linop.errors import LinopError

def main(backend):
    me, n = backend.worker, backend.workers
    odd, P = me == n - 1, Partition((1, n))
    def linear():
        return layers.Linear(P, P, P, 4 * n, 4 * n)
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.third = linear(), linear(), linear()
        def forward(self, x, skip=False):
            x = self.first(x)
            return self.third(x if skip else self.second(x))
    net = Net()
    def batch(size=2):
        return torch.ones(size, 4)
    for _ in range(2):
        net(batch())
    {misuse}

try:
    linop.launch(main)
    say("ended well")
except LinopError as error:
    say(f"{{type(error).__name__}}: {{error}}")
"""

WAITS = r"worker \d+ waits for "
CALLS = rf"{WAITS}a message from worker \d in stage 0 of plan \d, <.*> \(in Net\.first \(Linear\), "
BACK = rf"{WAITS}worker 0 to call plan \d \(adjoint\), <.*> \(in Net\.third \(Linear\), backward, "
END = rf"{WAITS}worker \d to end linop\.launch \(program\.py:\d+\)"

MISUSES = {
    "backward on one": ("y = net(batch()); odd and y.sum().backward()", (BACK, END)),
    "backward on one, and forward": (
        "y = net(batch()); odd and y.sum().backward(); net(batch())",
        (BACK, CALLS),
    ),
    "grad on one": (
        "x = batch().requires_grad_(); y = net(x)\n"
        "    odd and torch.autograd.grad(y.sum(), x)\n    net(x)",
        (BACK, CALLS),
    ),
    "a broken promise": (
        "with layers.fixed_shapes():\n"
        "        for _ in range(2): net(batch())\n"
        "        net(batch(3 if odd else 2))",
        (r"\(in Net\.first \(Linear\), program\.py:\d+\); .*\(in Net\.first \(Linear\), prog",),
    ),
    "a broken promise, of known shapes": (
        "net(batch(3))\n"
        "    with layers.fixed_shapes():\n"
        "        for size in (2, 3): net(batch(size))\n"
        "        net(batch(3 if odd else 2))",
        (r"\(in Net\.first \(Linear\), program\.py:\d+\); .*\(in Net\.first \(Linear\), prog",),
    ),
    "a layer constructed on one": (
        "odd and linear(); net(batch())",
        (rf"{WAITS}worker \d to construct Linear \(program\.py:\d+\)", CALLS),
    ),
    "a layer constructed on one at the end": (
        "odd and linear()",
        (r"BackendError: workers do different .*: end linop\.launch; worker \d: construct Linear",),
    ),
    "a state gathered on one": (
        "odd and layers.gather_state(net); net(batch())",
        (rf"{WAITS}worker \d to call linop\.layers\.gather_state \(program\.py:", CALLS),
    ),
    "a state gathered on one at the end": (
        "odd and layers.gather_state(net)",
        (r"BackendError: workers do different .* call linop\.layers\.gather_state\. Do",),
    ),
    "one iteration fewer": (
        "for _ in range(3 - odd): net(batch()).sum().backward()",
        (CALLS, END),
    ),
    "a layer skipped": (
        "net(batch(), skip=odd)",
        (
            r"BackendError: Net\.(second|third) \(Linear\): workers call different layers: worker "
            r"\d calls Net\.\w+ \(Linear\) \(layer \d\), worker \d calls Net\.",
        ),
    ),
}


@pytest.mark.parametrize("windows", ["0", "1"])
@pytest.mark.parametrize("misuse", MISUSES)
def test_a_rank_that_does_not_come(misuse: str, windows: str, tmp_path: Path) -> None:
    code, expected = MISUSES[misuse]
    ranks = 2 + list(MISUSES).index(misuse) % 2
    job = mpiexec(
        ranks, tmp_path / "program.py", PROGRAM.format(misuse=code), LINOP_WINDOWS=windows
    )
    assert job.stdout.count("Error: ") == ranks, job.stdout + job.stderr
    texts = set()
    for said in job.stdout.splitlines():
        assert said.startswith(("DeadlockError: ", "BackendError: ")), said
        for words in expected:
            assert re.search(words, said), (words, said)
        texts.add(re.sub(r"^.*?(deadlock|workers (call|do) different)", r"\1", said))
    assert len(texts) == 1
