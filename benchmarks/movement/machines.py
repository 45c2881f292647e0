"""`run.py` where ranks share no memory, or are on several machines.

    LINOP_MACHINES=FOLDER python benchmarks/movement/machines.py [LAYOUT ...] [--quick]
    LINOP_MACHINES=FOLDER python benchmarks/movement/machines.py 2x1 --program overlap --mbit 1000

A layout is ``messages``, two ranks of this machine without shared memory, or ``MxR``: M machines,
made of namespaces by the scripts in the folder, of R ranks each. The tables are
``results/<mpi>-LAYOUT.md``; other programs print theirs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

HERE = Path(__file__).parent
LAYOUTS = ("messages", "2x1", "2x2", "4x1")


def main(
    layouts: Annotated[list[str] | None, typer.Argument(help="[all four]")] = None,
    quick: Annotated[bool, typer.Option(help="As for run.py.")] = False,
    only: Annotated[list[str] | None, typer.Option(help="As for run.py.")] = None,
    program: Annotated[str, typer.Option(help="Another program beside this one.")] = "run",
    mbit: Annotated[int, typer.Option(help="Mbit/s of a machine's link; 0: no limit.")] = 0,
) -> None:
    """Measure each layout; status 1 where one failed."""
    failed = 0
    for layout in layouts or LAYOUTS:
        machines, each = (1, 2) if layout == "messages" else map(int, layout.split("x"))
        command = [sys.executable, str(HERE / f"{program}.py"), "--ranks", str(machines * each)]
        if program == "run":
            command += ["--label", layout, "--no-peers", *(["--quick"] if quick else [])]
            for part in only or ():
                command += ["--only", part]
        if layout == "messages":
            env = os.environ | {"LINOP_WINDOWS": "0"}
            failed |= subprocess.run(command, env=env, check=False).returncode
        else:
            with tempfile.TemporaryDirectory() as state:
                failed |= on_machines(machines, each, command, Path(state), mbit)
    raise typer.Exit(1 if failed else 0)


def on_machines(machines: int, each: int, command: list[str], state: Path, mbit: int) -> int:
    """Run a command on the first of some machines, whose ``mpiexec`` starts ranks on all."""
    scripts = Path(os.environ["LINOP_MACHINES"])
    hosts = [f"node{k + 1}" for k in range(machines)]
    (state / "openmpi").write_text("".join(f"{host} slots={each}\n" for host in hosts))
    (state / "mpich").write_text("".join(f"{host}:{each}\n" for host in hosts))
    env = os.environ | {
        "LINOP_NODES": str(state),
        "PRTE_MCA_plm_ssh_agent": str(scripts / "agent.sh"),
        "PRTE_MCA_prte_default_hostfile": str(state / "openmpi"),
        "PRTE_MCA_rmaps_default_mapping_policy": "slot",
        "PRTE_MCA_hwloc_default_binding_policy": "none",
        "HYDRA_LAUNCHER": "ssh",
        "HYDRA_LAUNCHER_EXEC": str(scripts / "agent.sh"),
        "HYDRA_HOST_FILE": str(state / "mpich"),
        "UCX_LOG_LEVEL": "error",
    }
    on = scripts / "on.sh"
    limit = f"tc qdisc add dev eth0 root tbf rate {mbit}mbit burst 256kb latency 50ms".split()
    subprocess.run([scripts / "up.sh", str(machines)], env=env, check=True)
    try:
        for host in hosts if mbit else ():
            subprocess.run([on, host, *limit], env=env, check=True)
        return subprocess.run([on, hosts[0], *command], env=env, check=False).returncode
    finally:
        subprocess.run([scripts / "down.sh"], env=env, check=False)


if __name__ == "__main__":
    typer.run(main)
