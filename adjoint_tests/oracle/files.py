"""Checkpoints and ports: what is at the path of a save, files that were made to harm, and other
processes that speak to what a job listens on."""

from __future__ import annotations

import os
import pickle
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist

import linop
from linop import layers
from linop.errors import LinopError
from oracle.cases import Case, Drawer, want
from oracle.forked import forked

torch.set_num_threads(1)


def on_workers(workers: int, action: Callable[[Any], None], value: float) -> None:
    """Call an action on each worker with a small distributed model, all of one value."""

    def main(backend: Any) -> None:
        one, cut = linop.Partition((1, 1)), linop.Partition((1, workers))
        model = layers.Linear(one, 6, 4, P_W=cut, dtype=torch.float64)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(value)
        action(model)

    linop.launch(main, workers, "threads")


def values_in(path: Path) -> set[float]:
    """The numbers in a file that torch alone reads."""
    state = torch.load(path, weights_only=True)
    return {float(number) for tensor in state.values() for number in tensor.reshape(-1)}


ANEW = {"new", "dangling link"}
"""Kinds of paths at which a file is made."""
REFUSED = {"fifo", "folder", "device", "socket", "empty", "no folder", "link to fifo"}
"""Kinds of paths at which no file can be made."""


def draw_place(random: Random) -> Case:
    kind = random.choice(sorted(ANEW | REFUSED | {"file", "hard link", "link", "link to a link"}))
    mode = random.choice([0o600, 0o640, 0o644, 0o664])
    workers, text_path = random.randint(1, 2), random.random() < 0.5

    def check() -> None:
        with tempfile.TemporaryDirectory() as folder:
            forked(partial(_saves_at, Path(folder), kind, mode, workers, text_path))

    return Case(15, f"save to a {kind}, mode {mode:o}, {workers} workers, {text_path=}", check)


def _saves_at(folder: Path, kind: str, mode: int, workers: int, text: bool) -> None:
    path, target, second = folder / "x", folder / "target", folder / "second"
    if kind in ("file", "link", "link to a link", "hard link"):
        real = path if kind == "file" else target
        on_workers(workers, lambda model: layers.save(model, real), 1.0)
        real.chmod(mode)
    if kind in ("link", "dangling link", "link to fifo"):
        path.symlink_to(target)
    if kind == "link to a link":
        second.symlink_to(target)
        path.symlink_to(second)
    if kind == "hard link":
        path.hardlink_to(target)
    if kind in ("fifo", "link to fifo"):
        os.mkfifo(target if kind == "link to fifo" else path, mode)
    if kind == "folder":
        path.mkdir()
    if kind == "device":
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    if kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
    if kind == "no folder":
        path = folder / "none" / "x"
    before = path.stat() if path.exists() else None
    given: Any = "" if kind == "empty" else str(path) if text else path
    refused = None
    try:
        on_workers(workers, lambda model: layers.save(model, given), 2.0)
    except LinopError as error:
        refused = error
    if kind in REFUSED:
        want(refused, f"a {kind} was taken")
        if before is not None and kind != "empty":
            now = path.stat()
            same = (now.st_mode, now.st_ino) == (before.st_mode, before.st_ino)
            want(same, f"the {kind} is another one now")
        return
    want(refused is None, f"refused: {refused}")
    want(values_in(path) == {2.0}, "another state")
    if "link" in kind and kind != "hard link":
        want(path.is_symlink(), "the link is gone")
        want(values_in(target) == {2.0}, "the target has the old state")
    if before is not None:
        want(stat.S_IMODE(path.stat().st_mode) == mode, f"mode {path.stat().st_mode:o}")


def hostile_pickle(random: Random) -> tuple[str, bytes]:
    """A pickle of plain data alone, which any reader may be given, and its name."""
    kind = random.choice(["nested keys", "nested value", "wide", "number", "cycle", "opcodes"])
    depth = random.choice([3, 25, 60, 1000, 200_000])
    cycle: dict[str, Any] = {}
    cycle["weight"] = cycle
    made: dict[str, Callable[[], bytes]] = {
        # A tuple of twice the tuple before, again and again: few bytes, 2**depth leaves to hash.
        "nested keys": lambda: b"\x80\x02})" + b"q\x00h\x00\x86" * min(depth, 1000) + b"K\x01s.",
        "nested value": lambda: b"\x80\x02)" + b"\x85" * depth + b".",
        "wide": lambda: pickle.dumps({f"k{i}": i for i in range(depth)}, 2),
        "number": lambda: pickle.dumps({"weight": 1 << (40 * depth)}, 2),
        "cycle": lambda: pickle.dumps(cycle, 2),
        "opcodes": lambda: bytes(
            random.choices(b"\x80\x02(}]).stueqhXK\x85\x86\x87ljra", k=random.randint(5, 200))
        ),
    }
    return f"{kind} {depth}", made[kind]()


def _replaced(source: Path, target: Path, change: Callable[[str, bytes], bytes], pack: int) -> None:
    """A copy of an archive with other contents."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", pack) as new:
        for info in old.infolist():
            new.writestr(info.filename, change(info.filename, old.read(info)))


def draw_hostile(random: Random) -> Case:
    kind = random.choice(["pickle", "pickle", "zeros", "flip", "cut", "index", "bare pickle"])
    workers, seed = random.randint(1, 2), random.getrandbits(32)
    said, data = hostile_pickle(random)

    def check() -> None:
        with tempfile.TemporaryDirectory() as folder:
            _make_hostile(Path(folder), kind, data, Random(seed), workers)
            forked(partial(_loads, Path(folder) / "bad", workers))

    text = (
        f"load of {kind} {said if 'pickle' in kind or kind == 'index' else ''}, {workers} workers"
    )
    return Case(16, text, check)


def _make_hostile(folder: Path, kind: str, data: bytes, random: Random, workers: int) -> None:
    good, bad = folder / "good", folder / "bad"
    sharded = kind == "index"
    on_workers(workers, lambda model: layers.save(model, good, sharded=sharded), 1.0)
    if kind == "index":
        shutil.copytree(good, bad)
        next(iter(bad.glob(".metadata"))).write_bytes(data)
    elif kind == "bare pickle":
        bad.write_bytes(data)
    elif kind == "pickle":
        torch.save({"weight": torch.zeros(1)}, good)
        _replaced(good, bad, lambda n, d: data if n.endswith("data.pkl") else d, 0)
    elif kind == "zeros":
        torch.save({"weight": torch.zeros(4, 6), "bias": torch.zeros(4)}, good)
        size = random.choice([50_000_000, 500_000_000])

        def long(name: str, old: bytes) -> bytes:
            return bytes(size) if "/data/" in name else old

        _replaced(good, bad, long, zipfile.ZIP_DEFLATED)
    else:
        whole = bytearray(good.read_bytes())
        if kind == "cut":
            del whole[random.randrange(len(whole)) :]
        else:
            whole[random.randrange(len(whole))] ^= 1 << random.randrange(8)
        bad.write_bytes(whole)


def _loads(path: Path, workers: int) -> None:
    """Every worker has its old numbers and the usual error, or what was saved."""

    def action(model: Any) -> None:
        try:
            layers.load(model, path)
        except LinopError:
            kept = {float(x) for p in model.parameters() for x in p.detach().reshape(-1)}
            want(kept <= {3.0}, f"refused, but changed: {kept}")
            raise

    on_workers(workers, action, 3.0)


PROGRAM = """
import os, sys, time
import numpy as np
import torch.distributed as dist
import linop
backend = linop.backends.get("torch", wait_limit=20)
print("READY", flush=True)
X = linop.TensorSpace((4 * backend.workers,), linop.Partition((backend.workers,)))
R = linop.TensorSpace((4,), linop.Partition((backend.workers,)), axes=[linop.COPIES])
for k in range(30):
    plan = linop.all_reduce(R, 0).compile(backend)
    y = plan(np.full(4, backend.worker + k + 1.0))
    n = backend.workers
    assert y.tolist() == [n * k + n * (n + 1) / 2.0] * 4, y
    v = backend.vector(X, {X.region(backend.worker).name: np.ones(4)})
    assert abs(v.norm() ** 2 - 4 * n) < 1e-9
    time.sleep(0.1)
print("DONE", backend.worker, flush=True)
"""


class _Payload:
    """Unpickling it makes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def listening(processes: list[int]) -> list[tuple[str, int]]:
    """Addresses that processes listen on, TCP alone."""
    sockets = set()
    for process in processes:
        try:
            entries = list(Path(f"/proc/{process}/fd").iterdir())
        except OSError:
            continue
        for entry in entries:
            try:
                sockets.add(os.readlink(entry))
            except OSError:
                continue
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                address, port = fields[1].split(":")
                found.append((address, int(port, 16)))
    return found


def descendants(process: int) -> list[int]:
    """The process, and what it started."""
    children = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(process)], capture_output=True, text=True, check=False
    ).stdout.split()
    return [process, *(d for child in children for d in descendants(int(child)))]


def draw_attack(random: Random) -> Case:
    workers = random.randint(2, 3)
    ways = ["forge", "overwrite", "append", "delete", "garbage", "replay"]
    way, launcher = random.choice(ways), random.choice(["torchrun", "processes"])
    delay = random.uniform(0.0, 1.0)

    def check() -> None:
        with tempfile.TemporaryDirectory() as folder:
            _attacked(Path(folder), way, launcher, workers, delay)

    return Case(17, f"{way} after {delay:.1f} s, {workers} {launcher}", check, seconds=120)


def _started(folder: Path, launcher: str, workers: int) -> list[subprocess.Popen[bytes]]:
    program = folder / "program.py"
    program.write_text(PROGRAM)
    out = (folder / "output").open("wb")
    if launcher == "torchrun":
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(workers), str(program)]
        return [subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank in range(workers):
        names = {
            "RANK": rank,
            "WORLD_SIZE": workers,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        env = os.environ | {name: str(value) for name, value in names.items()}
        command = [sys.executable, str(program)]
        started.append(subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT))
    return started


def _attacked(folder: Path, way: str, launcher: str, workers: int, delay: float) -> None:
    owned = folder / "owned"
    jobs = _started(folder, launcher, workers)
    try:
        end, seen = time.monotonic() + 60, False
        old: dict[tuple[int, str], bytes] = {}
        first = None
        while time.monotonic() < end and any(job.poll() is None for job in jobs):
            ready = (folder / "output").read_text(errors="replace").count("READY") == workers
            first = first or (time.monotonic() if ready else None)
            if first and time.monotonic() > first + delay:
                for _, port in listening([d for job in jobs for d in descendants(job.pid)]):
                    seen |= _disturb(port, way, str(owned), old)
            time.sleep(0.02)
        done = [job.poll() for job in jobs]
        want(None not in done, "the job never ends")
        want(not owned.exists(), "the code of another process ran")
        output = (folder / "output").read_text(errors="replace")
        if any(done):
            want("linop.errors." in output or "Error" in output, "ended without an error")
        elif way != "garbage":
            want(output.count("DONE") == workers, f"ended early: {output[-300:]}")
    finally:
        for job in jobs:
            for process in descendants(job.pid):
                try:
                    os.kill(process, 9)
                except ProcessLookupError:
                    pass
            job.wait()


def _disturb(port: int, way: str, owned: str, old: dict[tuple[int, str], bytes]) -> bool:
    """Do something to what listens on a port of this machine; True if it is a store with keys."""
    if way == "garbage":
        try:
            with socket.create_connection(("127.0.0.1", port), 1) as connection:
                connection.sendall(pickle.dumps(_Payload(owned)) * 3)
        except OSError:
            return False
        return True
    try:
        from datetime import timedelta

        store = dist.TCPStore(
            "127.0.0.1", port, None, False, timedelta(seconds=2), wait_for_workers=False
        )
        keys = store.list_keys()
    except Exception:
        return False
    for key in keys:
        try:
            if way == "forge":
                if store.get(key).isdigit():  # a counter of numbered messages
                    store.set(f"{key}/{store.add(key, 1)}", pickle.dumps(_Payload(owned)))
            elif way == "delete":
                store.delete_key(key)
            elif way == "replay":
                value = store.get(key)
                store.set(key, old.setdefault((port, key), value))
            elif way == "append":
                store.append(key, b"\x00more")
            else:
                store.set(key, pickle.dumps(_Payload(owned)))
        except Exception:
            continue
    return bool(keys)


DRAWERS: dict[int, list[Drawer]] = {15: [draw_place], 16: [draw_hostile], 17: [draw_attack]}
"""Drawers of cases, by kind."""
