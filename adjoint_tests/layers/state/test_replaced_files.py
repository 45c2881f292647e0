"""A save writes regular files alone: it follows links, keeps owner and mode, and refuses what is no
file, which stays as it is. So does whatever else writes a file that the user names."""

from __future__ import annotations

import importlib.util
import os
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import linop
from linop import writing
from linop.backends.engine.tracing import traced
from linop.errors import ArgumentError, LinopError
from linop.schedules import one_forward_one_backward, simulate
from linop.tools import drawing, reporting

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

import torch

from linop import launch, layers
from support.layers.checkpoints import filled, save_value, value_in

ROOT, NOBODY = os.geteuid() == 0, 65534


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_socket(path: Path) -> None:
    os.symlink(path.parent / "s", path)
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path.parent / "s"))


def a_device(path: Path) -> None:
    os.symlink("/dev/zero", path)


def a_folder(path: Path) -> None:
    path.mkdir()


NO_FILES = (a_pipe, a_socket, a_device, a_folder)


def save(path: Any) -> None:
    """A save, whose error is the same on both workers."""

    def main(_: Any) -> str:
        try:
            layers.save(filled(3), path)
        except LinopError as error:
            return str(error)
        return ""

    first, second = launch(main, 2)
    assert first == second
    if first:
        raise ArgumentError(first)


def trace(path: Any) -> None:
    def main(backend: Any) -> None:
        with traced(backend, Path(path), getattr(backend, "transport", None)):
            pass

    launch(main, 1, backend="threads")


def picture(path: Any) -> None:
    simulate(one_forward_one_backward(2, 2), lambda action: 1.0).to_svg(path)


def times(path: Any) -> None:
    simulate(one_forward_one_backward(2, 2), lambda action: 1.0).to_trace(path)


def matrix(path: Any) -> None:
    pytest.importorskip("matplotlib")
    P = linop.Partition((2,))
    drawing.traffic(path, linop.all_reduce(linop.TensorSpace((3,), P, axes=(linop.COPIES,))))


def report(path: Any) -> None:
    reporting.write([], Path(path), None)


def junit(path: Any) -> None:
    pytest.importorskip("junitparser")
    reporting.write([], None, Path(path))


WRITERS = (save, trace, picture, times, matrix, report, junit)


@pytest.mark.parametrize("writer", WRITERS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("kind", NO_FILES, ids=lambda f: f.__name__)
def test_what_is_no_file_is_refused(
    writer: Callable[[Any], None], kind: Callable[[Path], None], tmp_path: Path
) -> None:
    path = tmp_path / "x.png"
    kind(path)
    before = path.lstat()
    with pytest.raises(ArgumentError, match="a regular file expected"):
        writer(path)
    after = path.lstat()
    assert (after.st_mode, after.st_ino) == (before.st_mode, before.st_ino)
    left = {"x.png", "s"} if kind is a_socket else {"x.png"}
    assert {one.name for one in tmp_path.iterdir()} == left


@pytest.mark.parametrize("writer", WRITERS, ids=lambda f: f.__name__)
def test_an_empty_path_is_refused(writer: Callable[[Any], None]) -> None:
    with pytest.raises(ArgumentError):
        writer("")


@pytest.mark.parametrize("sharded", [False, True], ids=["file", "folder"])
def test_nothing_is_loaded_from_an_empty_path(sharded: bool) -> None:
    def main(_: Any) -> None:
        with pytest.raises(ArgumentError, match="'' is no"):
            layers.save(filled(3), "", sharded=sharded)
        with pytest.raises(ArgumentError, match="'' is no path"):
            layers.load(filled(3), "")

    launch(main, 2)


@given(mode=st.integers(0, 0o777), links=st.integers(0, 3), there=st.booleans(), data=st.data())
def test_links_are_followed_and_owner_and_mode_are_kept(
    mode: int, links: int, there: bool, data: st.DataObject
) -> None:
    if not ROOT:
        mode |= 0o600
    with tempfile.TemporaryDirectory(prefix="linop-test-") as where:
        folder, file = Path(where), Path(where) / "elsewhere" / "file"
        file.parent.mkdir()
        path = file
        if there:
            file.write_bytes(b"old")
            file.chmod(mode)
            if ROOT and data.draw(st.booleans()):
                os.chown(file, 12345, 54321)
        before = file.stat() if there else None
        for k in range(links):
            (link := folder / f"link{k}").symlink_to(path)
            path = link
        save_value(path, 3, sharded=False)
        assert value_in(path) == 3
        assert path.is_symlink() == (links > 0)
        assert not file.is_symlink() and len([*file.parent.iterdir()]) == 1
        if before is not None:
            after = file.stat()
            assert stat.S_IMODE(after.st_mode) == mode
            assert (after.st_uid, after.st_gid) == (before.st_uid, before.st_gid)
        else:
            torch.save({}, twin := folder / "twin")
            assert file.stat().st_mode == twin.stat().st_mode


@contextmanager
def a_users_folder() -> Iterator[Path]:
    """A folder, and a user who is not root."""
    importlib.import_module("linop.layers.state.sharded_save")  # which that user may not read
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o777)
        if not ROOT:
            yield Path(name)
            return
        os.setegid(NOBODY)
        os.seteuid(NOBODY)
        try:
            yield Path(name)
        finally:
            os.seteuid(0)
            os.setegid(0)


def test_a_file_that_may_not_be_written_is_not_replaced() -> None:
    with a_users_folder() as folder:
        (folder / "x").write_bytes(b"old")
        (folder / "x").chmod(0o400)
        with pytest.raises(LinopError, match="Permission denied"):
            save(folder / "x")
        assert (folder / "x").read_bytes() == b"old"


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("mode", [0o300, 0o100])
def test_a_folder_that_may_not_be_read_has_what_is_saved(sharded: bool, mode: int) -> None:
    """Its names are known to those who use it, and no error tells that a save had failed."""
    with a_users_folder() as folder:
        file = folder / "private" / "x"
        file.parent.mkdir()
        save_value(file, 1, sharded)
        hidden = file if sharded else file.parent
        hidden.chmod(mode | 0o200)
        save_value(file, 2, sharded)
        hidden.chmod(0o700)
        file.parent.chmod(mode if sharded else 0o700)
        if sharded:
            save_value(file, 3, sharded)
            file.parent.chmod(0o700)
        assert value_in(file) == 2 + sharded


@given(
    st.booleans(),
    st.booleans(),
    st.integers(1, 255),
    st.sampled_from(["a", "ä", "."]),
)
def test_names_of_any_length(sharded: bool, in_bytes: bool, length: int, letter: str) -> None:
    name = "x" + letter * ((length - 1) // len(letter.encode()))
    with tempfile.TemporaryDirectory() as folder:
        path: Any = os.path.join(folder, name)
        given_path = os.fsencode(path) if in_bytes else path
        for value in (1, 2):
            save_value(given_path, value, sharded)
        assert os.listdir(folder) == [name]
        assert value_in(Path(path)) == 2


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("path", ["", "a\0b", b"a\0b", 3, None])
def test_what_is_no_path_is_refused(path: Any, sharded: bool) -> None:
    with pytest.raises(ArgumentError, match="path"):
        save_value(path, 1, sharded)
    with pytest.raises(ArgumentError, match="path"):
        value_in(path)


def test_an_index_that_is_no_file_of_the_folder_is_refused(tmp_path: Path) -> None:
    """By saves as by loads, and no descriptor stays open."""
    save_value(tmp_path / "warm", 1, True)
    opened = len(os.listdir("/proc/self/fd"))
    (tmp_path / "folder" / ".metadata").mkdir(parents=True)
    save_value(tmp_path / "linked", 1, True)
    index = tmp_path / "linked" / ".metadata"
    index.rename(tmp_path / "elsewhere")
    index.symlink_to(tmp_path / "elsewhere")
    for name in ("folder", "linked"):
        with pytest.raises(LinopError, match="metadata"):
            save_value(tmp_path / name, 2, True)
        with pytest.raises(LinopError, match="metadata"):
            value_in(tmp_path / name)
    assert len(os.listdir("/proc/self/fd")) == opened


def test_streams_may_be_named_by_reports(capfd: pytest.CaptureFixture[str]) -> None:
    writing.write_text("/dev/null", "nothing")
    with capfd.disabled():
        assert writing.target("/dev/null", streams=True) == Path("/dev/null")
    with pytest.raises(ArgumentError, match="is a device"):
        writing.target("/dev/null")
