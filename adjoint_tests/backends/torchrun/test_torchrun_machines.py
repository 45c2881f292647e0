"""The backend ``torch`` on processes of two machines, made of namespaces, started by a torchrun on
each."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from support.machines import Machines, missing_machines
from support.requirements import needs_torch
from support.torchrun import drawn

_missing = missing_machines()
pytestmark = [
    needs_torch,
    pytest.mark.skipif(bool(_missing), reason=_missing or "machines can be made"),
    pytest.mark.timeout(120),
]

ALL = """
import pickle
import torch
from support.contracts import torchrun
from support.layers import contracts, networks

torch.set_num_threads(1)  # processes share the cores
backend = linop.backends.get("torch", wait_limit=30)
with linop.backends.use(backend):
    contracts.replicated_linear_layers_are_megatrons(backend)
    torchrun.the_catalogue(backend, pickle.load(open(sys.argv[0] + ".cases", "rb")))
    if backend.workers == 4:
        networks.lenet_trains_as_its_twin(backend, "digits", 64, 3, 1e-10)
say(f"right on {os.uname().nodename}")
"""


KILLED = """
import signal
plan = total(2).compile(backend)
try:
    for k in range(10_000):
        plan(np.ones(3))
        if k == 5 and backend.worker == 1:
            os.kill(os.getpid(), signal.SIGKILL)
except linop.errors.LinopError as error:
    say(f"{type(error).__name__}: {error}")
    raise
"""


def cases(program: Path, workers: int) -> None:
    """Write the operators of the catalogue to a file beside the program."""
    program.with_name(program.name + ".cases").write_bytes(pickle.dumps(drawn()[workers]))


def test_one_process_each_and_one_is_killed(machines: Machines, program: Path) -> None:
    """The one that is left is told, though the wait limit is far."""
    cases(program, 2)
    text = ALL.replace("wait_limit=30", "wait_limit=600") + KILLED
    first, second = machines.torchrun(1, program, text)
    right, told = first.stdout.splitlines()
    assert right == "right on node1" and second.stdout == "right on node2\n"
    assert "Error: the connection to worker 1 ended during a wait" in told
    assert first.returncode != 0 and second.returncode != 0


def test_two_processes_each(machines: Machines, program: Path) -> None:
    cases(program, 4)
    for k, job in enumerate(machines.torchrun(2, program, ALL), start=1):
        assert job.returncode == 0, job.stderr
        assert job.stdout.splitlines() == [f"right on node{k}"] * 2, job.stderr
    assert machines.shared_files() == []
