"""``linop doctor --mpi``: the slots that mpiexec has, and the way to start more ranks."""

from __future__ import annotations

import os
import re
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from linop.backends.mpi import mpirun
from linop.tools import slots
from support.requirements import needs_mpi

HEAD = "======================   ALLOCATED NODES FOR JOB prterun-vm-1@{}  ======================\n"
NODE = "    node{}: slots={} max_slots=0 slots_inuse=0 state=UP\n\tFlags: SLOTS_GIVEN\n"
ALLOWED = {slots.OVERSUBSCRIBE: ":oversubscribe", slots.YIELD: "1"}


def allocation(*nodes: int) -> str:
    """Open MPI's words: of its own job, then of the user's."""
    listed = "".join(NODE.format(k, n) for k, n in enumerate(nodes))
    return HEAD.format(0) + NODE.format(0, 99) + HEAD.format(1) + listed + "=====\n"


@given(st.lists(st.integers(1, 64), min_size=1, max_size=5))
def test_slots_are_counted_over_machines(nodes: list[int]) -> None:
    said = slots.in_words(allocation(*nodes), {})
    machines = f"{len(nodes)} machine{'s' if len(nodes) > 1 else ''}"
    assert said.startswith(f"slots: {sum(nodes)} on {machines} (from the cores of this machine). ")
    assert f"mpiexec -n {sum(nodes) + 1} fails" in said
    assert f"export {slots.OVERSUBSCRIBE}=:oversubscribe {slots.YIELD}=1" in said


@pytest.mark.parametrize(
    ("environment", "words", "missing"),
    [
        ({"SLURM_TASKS_PER_NODE": "2(x4)"}, "from Slurm: SLURM_TASKS_PER_NODE=2(x4)", "PBS"),
        (
            {"PRTE_MCA_prte_default_hostfile": "/hosts"},
            "from a hostfile: PRTE_MCA_prte_default_hostfile=/hosts",
            "cores",
        ),
        ({"PBS_NODEFILE": "f"}, "from PBS: PBS_NODEFILE=f", "Slurm"),
        (ALLOWED, f"More ranks than slots are allowed by {slots.OVERSUBSCRIBE}", "export"),
        (
            {slots.OVERSUBSCRIBE: "ppr:2:node:OVERSUBSCRIBE"},
            f"wait busily, export {slots.YIELD}=1",
            "fails",
        ),
        ({slots.YIELD: "true"}, f"export {slots.OVERSUBSCRIBE}=:oversubscribe", slots.YIELD),
    ],
)
def test_what_the_environment_says(environment: dict[str, str], words: str, missing: str) -> None:
    said = slots.in_words(allocation(2), environment)
    assert words in said
    assert missing not in said


def test_another_launcher_does_not_say() -> None:
    assert slots.in_words("", {}).startswith("slots: unknown")
    assert slots.in_words("usage: mpiexec slots=3", {}).startswith("slots: unknown")


@needs_mpi
@pytest.mark.timeout(120)
def test_the_hint_is_right(tmp_path: os.PathLike[str]) -> None:
    """As mpiexec says its slots, one rank more fails, and starts with the variables."""
    own = {k: v for k, v in os.environ.items() if k not in (slots.OVERSUBSCRIBE, slots.YIELD)}
    said = slots.report(own)
    number = re.match(r"slots: (\d+) ", said)
    if number is None:
        pytest.skip(said)
    root = {k: v for k, v in mpirun.DEFAULTS.items() if k.startswith("OMPI_ALLOW")}
    command = mpirun.command(int(number[1]) + 1, ["true"])
    for more, works in (({}, False), (ALLOWED, True)):
        env = own | root | more
        done = subprocess.run(command, env=env, capture_output=True, check=False, timeout=50)
        assert (done.returncode == 0) == works, done.stderr
    hosts = os.path.join(tmp_path, "hosts")
    with open(hosts, "w") as file:
        file.write("localhost slots=7\n")
    said = slots.report(own | {"PRTE_MCA_prte_default_hostfile": hosts})
    assert said.startswith("slots: 7 on 1 machine (from a hostfile: ")
