"""The number of ranks that ``mpiexec`` starts without being asked to oversubscribe (its *slots*),
where it has it from, and the way to start more; for ``linop doctor --mpi``."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping

from linop.backends.mpi import mpirun

OVERSUBSCRIBE = "PRTE_MCA_rmaps_default_mapping_policy"
YIELD = "OMPI_MCA_mpi_yield_when_idle"
SOURCES = {
    "PRTE_MCA_prte_default_hostfile": "a hostfile",
    "OMPI_MCA_orte_default_hostfile": "a hostfile",
    "SLURM_TASKS_PER_NODE": "Slurm",
    "PBS_NODEFILE": "PBS",
    "LSB_MCPU_HOSTS": "LSF",
}
"""Variables from which Open MPI's launcher has its slots, and whose they are; without any, it has
the cores of this machine."""
_SECONDS = 20
"""Limit for mpiexec's answer."""


def report(environment: Mapping[str, str] = os.environ) -> str:
    """The slots of the ``mpiexec`` here, by its own account, in one or two sentences.

    Raises:
        MissingExtraError: there is none.
    """
    return in_words(said(environment), environment)


def said(environment: Mapping[str, str]) -> str:
    """The text that Open MPI's ``mpiexec`` prints of its allocation; empty for another launcher, or
    if it fails.

    Raises:
        MissingExtraError: there is none.
    """
    mpiexec, *rest = mpirun.command(1, ["true"])
    try:
        done = subprocess.run(
            [mpiexec, "--display", "allocation", *rest],
            env=mpirun.DEFAULTS | dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            text=True,
            timeout=_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr if done.returncode == 0 else ""


def in_words(allocation: str, environment: Mapping[str, str]) -> str:
    """The number of slots, where it is from, and how to start more ranks.

    Args:
        allocation: as `said` gives it.
        environment: the user's variables.
    """
    nodes = re.findall(r": slots=(\d+)", allocation.rpartition("ALLOCATED NODES")[2])
    if not nodes:
        return (
            "slots: unknown, as mpiexec does not say (MPICH's has no limit, and starts as many "
            "ranks as it is asked for)"
        )
    set_here = [name for name in SOURCES if name in environment]
    given = ", ".join(f"{SOURCES[name]}: {name}={environment[name]}" for name in set_here)
    number = sum(map(int, nodes))
    found = f"slots: {number} on {len(nodes)} machine{'s' * (len(nodes) > 1)}"
    return f"{found} (from {given or 'the cores of this machine'}). {more(number, environment)}"


def more(number: int, environment: Mapping[str, str]) -> str:
    """The way to start more ranks than slots, with Open MPI."""
    known = {OVERSUBSCRIBE: ":oversubscribe", YIELD: "1"}
    oversubscribes = "oversubscribe" in environment.get(OVERSUBSCRIBE, "").lower()
    yields = environment.get(YIELD, "0").lower() not in ("", "0", "false")
    missing = [n for n, there in ((OVERSUBSCRIBE, oversubscribes), (YIELD, yields)) if not there]
    export = "export " + " ".join(f"{name}={known[name]}" for name in missing)
    if not oversubscribes:
        return f"mpiexec -n {number + 1} fails; for more ranks than slots, {export}"
    advice = "" if yields else f"; so that they do not wait busily, {export}"
    return f"More ranks than slots are allowed by {OVERSUBSCRIBE}{advice}"
