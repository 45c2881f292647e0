"""A save leaves the old checkpoint or the new one, whole: killed at any time, or out of room."""

from __future__ import annotations

import importlib.util
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )


import support
from linop import LinopError, launch, layers
from linop.layers.state import files
from linop.testing.workers.jobs import FailedExampleError
from support.layers import checkpoints as checks
from support.layers.checkpoints import (
    BIG,
    begun,
    ended,
    files_of,
    filled,
    full_disk,
    save_value,
    value_in,
)
from support.requirements import needs_mpi
from support.workers import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
EITHER = pytest.mark.parametrize("sharded", [False, True], ids=["file", "folder"])


def killed(columns: int, kills: int | str) -> list[int]:
    """How many saves were killed, of files and of folders; see
    `support.layers.checkpoints.survives`."""
    script = [sys.executable, "-m", checks.__name__, str(columns), str(kills)]
    others = {**os.environ, "PYTHONPATH": str(Path(support.__file__).parents[1])}
    done = subprocess.run(script, capture_output=True, text=True, check=False, env=others)
    assert done.returncode == 0, done.stderr
    return [int(line) for line in done.stdout.splitlines()]


@pytest.mark.timeout(300)
def test_a_save_that_is_killed_anywhere_leaves_old_or_new() -> None:
    file, folder = killed(8, "all")
    assert file >= 4
    assert folder >= 20


@pytest.mark.timeout(300)
def test_a_save_that_is_killed_at_some_time_leaves_old_or_new() -> None:
    kills = max(4, min(settings().max_examples // 2, 100))
    assert killed(100_000, kills) == [kills, kills]


KILLS = [(False, 0, 1), (True, 1, 1), (True, 0, 6), (False, 0, 0), (True, 0, 0), (True, 0, 3)]
"""Of a folder or a file, which rank is killed, and at which file that it touches. The first ones
say most, and every job that is killed takes seconds: at all times is for threads, above."""


@needs_mpi
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "sharded, worker, at", KILLS[: 3 if settings().max_examples < 100 else None]
)
def test_a_rank_that_is_killed_in_a_save_leaves_old_or_new(
    tmp_path: Path, sharded: bool, worker: int, at: int
) -> None:
    path = str(tmp_path / "x")
    save_value(path, 1, sharded)
    with pytest.raises(FailedExampleError):
        on_ranks(3, checks.dies, path, 2.0, sharded, worker, at)
    assert value_in(path) in (1, 2)


@EITHER
def test_a_full_disk_leaves_the_old_checkpoint(tmp_path: Path, sharded: bool) -> None:
    save_value(tmp_path / "x", 1, sharded, BIG)
    before = {file: file.read_bytes() for file in files_of(tmp_path / "x")}

    def main(_: Any) -> str:
        with pytest.raises(LinopError) as caught:
            layers.save(filled(2, BIG), tmp_path / "x", sharded=sharded)
        return str(caught.value)

    with full_disk(BIG):
        first, second = launch(main, 2)
    assert first == second
    assert {file: file.read_bytes() for file in files_of(tmp_path / "x")} == before
    assert [file.name for file in tmp_path.iterdir()] == ["x"]
    assert value_in(tmp_path / "x", BIG) == 1


@needs_mpi
@pytest.mark.timeout(300)
@EITHER
def test_a_full_disk_of_one_rank_is_an_error_of_all(tmp_path: Path, sharded: bool) -> None:
    path = str(tmp_path / "x")
    on_ranks(3, checks.saves, path, 1.0, sharded, BIG)
    before = sorted(files_of(tmp_path / "x"))
    on_ranks(3, checks.fails_on_a_full_disk, path, sharded, int(sharded))
    assert sorted(files_of(tmp_path / "x")) == before
    assert value_in(path, BIG) == 1


@EITHER
def test_what_is_saved_is_synced_before_it_has_its_name(
    tmp_path: Path, sharded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, str]] = []
    sync, rename = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        events.append(("sync", os.readlink(f"/proc/self/fd/{descriptor}")))
        sync(descriptor)

    def renamed(old: Any, new: Any, **more: Any) -> None:
        events.append(("name", str(new)))
        rename(old, new, **more)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    path = tmp_path / "x"
    save_value(path, 1, sharded)
    named = path / ".metadata" if sharded else path
    at = events.index(("name", str(named)))
    before, after = events[:at], events[at + 1 :]
    shards = path.glob("*.distcp") if sharded else []
    assert {("sync", str(file)) for file in shards} <= set(before)
    assert any(name.startswith(f"{named.parent}/.{named.name}.") for _, name in before)
    assert ("sync", str(named.parent)) in after
    if sharded:
        assert ("sync", str(path)) in before
        assert ("sync", str(tmp_path)) in after


def test_links_of_names_of_parts_are_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    monkeypatch.setattr(files, "new_token", lambda: "0" * 16)
    (tmp_path / "x.part").symlink_to(victim)
    planted = tmp_path / f".x.{'0' * 16}.part"
    planted.symlink_to(victim)
    with pytest.raises(LinopError, match="File exists"):
        save_value(tmp_path / "x", 1, sharded=False)
    assert victim.read_text() == "mine"


@EITHER
def test_saves_at_once_leave_one_of_them(tmp_path: Path, sharded: bool) -> None:
    """Each is whole while the others end, and remove what killed ones have left."""
    path = str(tmp_path / "x")

    def saves(value: int) -> None:
        for _ in range(8):
            save_value(path, value, sharded)

    children = [begun(lambda value=value: saves(value)) for value in (1, 2, 3)]
    assert [ended(child) for child in children] == [0, 0, 0]
    assert value_in(path) in (1, 2, 3)
    assert len([*(Path(path) if sharded else tmp_path).iterdir()]) == (3 if sharded else 1)


def test_blocks_may_be_read_by_whom_their_index_may(tmp_path: Path) -> None:
    path = tmp_path / "x"
    save_value(path, 1, sharded=True)
    for file in path.iterdir():
        file.chmod(0o600)
    save_value(path, 2, sharded=True)
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()} == {0o600}
