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

def run(misuse):
    def main(backend):
        me, n = backend.worker, backend.workers
        odd, P = me == n - 1, Partition((1, n))
        def linear():
            return layers.Linear(P, 4 * n, 4 * n, P_W=P)
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
        misuse(odd, net, batch, linear)
    try:
        linop.launch(main)
        return "ended well"
    except LinopError as error:
        return f"{type(error).__name__}: {error}"
"""

WAITS = r"worker \d+ waits for "
CALLS = (  # by a plan, or by a board
    rf"{WAITS}(a message from worker \d in stage 0 of plan \d+, <.*>|worker \d to call layers) "
    r"\(in Net\.first \(Linear\), "
)
BACK = rf"{WAITS}worker 0 to call plan \d+ \(adjoint\), <.*> \(in Net\.third \(Linear\), backward, "
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
            r"\d calls Net\.\w+ \(Linear\) \(layer \d+\), worker \d calls Net\.",
        ),
    ),
    "a layer constructed on one": (
        "odd and linear(); net(batch())",
        (rf"{WAITS}worker \d to construct Linear \(program\.py:\d+\)", CALLS),
    ),
    "a layer constructed on one at the end": (
        "odd and linear()",
        (r"BackendError: workers do different .*: end linop\.launch; worker \d: construct Linear",),
    ),
}


MISUSE = """
def misuse(odd, net, batch, linear):
    {code}
say({name!r} + " | " + run(misuse))
say({name!r} + ", then | " + run(lambda *given: None))
"""


@pytest.mark.parametrize("windows", ["0", "1"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_that_does_not_come(ranks: int, windows: str, tmp_path: Path) -> None:
    """One misuse after the other, in one job: an error that all ranks raise is over, and a network
    that is made after it works, on what others have left in the backend."""
    mine = dict(list(MISUSES.items())[ranks % 2 :: 2])
    program = PROGRAM + "".join(
        MISUSE.format(name=name, code=code) for name, (code, _) in mine.items()
    )
    path = tmp_path / "program.py"
    job = mpiexec(ranks, path, program, patience=150, LINOP_WINDOWS=windows)
    lines = [line.split(" | ") for line in job.stdout.splitlines()]
    for misuse, (_, expected) in mine.items():
        said = [text for name, text in lines if name == misuse]
        assert len(said) == ranks, job.stdout + job.stderr
        for text in said:
            assert text.startswith(("DeadlockError: ", "BackendError: ")), text
            for words in expected:
                assert re.search(words, text), (words, text)
        assert (
            len({re.sub(r"^.*?(deadlock|workers (call|do) different)", r"\1", t) for t in said})
            == 1
        )
        then = {text for name, text in lines if name == f"{misuse}, then"}
        assert then == {"ended well"}, (misuse, then)
