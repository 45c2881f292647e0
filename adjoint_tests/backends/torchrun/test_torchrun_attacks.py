"""Another process connects to the store of a job of torchrun: it can run no code in the job, change
no result, and the job does not end as if nothing had happened."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from support import store_attacker
from support.job_programs import HEAD
from support.requirements import needs_torch

pytestmark = [needs_torch, pytest.mark.timeout(120)]

ATTACKED = """
import subprocess
backend = linop.backends.get("torch", wait_limit=60)
if backend.worker == 0:
    ATTACK
try:
    for k in range(1, 3001):
        plan = (k * total(backend.workers)).compile(backend)
        assert plan(np.ones(3)).tolist() == [k * backend.workers] * 3
        time.sleep(0.01)
except linop.errors.LinopError as error:
    say(f"{type(error).__name__}: {error}")
    raise
"""

LISTENS = """
from support.store_attacker import listening
backend = linop.backends.get("torch", wait_limit=20)
if backend.worker == 0:
    for address, port in listening(os.getpid()):
        say(f"{address} {port}")
backend.transport.gather_all(None)
"""


@pytest.mark.parametrize(("kind", "workers"), [("forge", 2), ("replay", 2), ("delete", 3)])
def test_who_meddles_with_the_store_ends_the_job(kind: str, workers: int, tmp_path: Path) -> None:
    from support.torchrun import torchrun

    payload = tmp_path / "payload"
    call = [sys.executable, store_attacker.__file__]
    attack = (
        f"subprocess.Popen([*{call!r}, str(os.getpid()), {kind!r}, {str(payload)!r}, '40'], "
        f"start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)"
    )
    done = torchrun(
        workers,
        tmp_path / "program.py",
        HEAD + ATTACKED.replace("ATTACK", attack),
        OMP_NUM_THREADS="1",
    )
    assert payload.with_name("payload.stores").read_text(), "the attacker has found no store"
    assert not payload.exists(), "code of the attacker's has run in the job"
    assert done.returncode != 0
    lines = done.stdout.splitlines()
    assert any("was tampered with" in line for line in lines), (done.stdout, done.stderr)


@pytest.mark.parametrize("workers", [1, 2])
def test_the_store_listens_on_the_loopback_interface_alone(workers: int, tmp_path: Path) -> None:
    """All processes are on one machine."""
    from support.torchrun import torchrun

    folder = str(Path(store_attacker.__file__).parents[1])
    path = f"import sys\nsys.path.insert(0, {folder!r})\n"
    done = torchrun(workers, tmp_path / "program.py", path + HEAD + LISTENS)
    assert done.returncode == 0, done.stderr
    found = [line.split()[0] for line in done.stdout.splitlines()]
    # Beside gloo's own ports, which are on the address of the machine's name.
    assert "0100007F" in found, found
    assert not {"0" * 8, "0" * 32} & {*found}, found
