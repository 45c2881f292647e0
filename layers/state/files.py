"""Files that are replaced atomically, and checked by digests before they are read.

A new file is written under an unguessable name beside the one that it replaces, synced, and renamed
at the end: at every instant the path holds the complete old file or the complete new one. It is
locked until then, which tells the part of a save that goes on, in any process, from what a killed
one has left.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import re
import secrets
import stat
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from linop.errors import BackendError
from linop.writing import target

_START, _END, _RECORD = b"PK\3\4", b"PK\5\6", 22
"""Zip archives: signature at the start; signature of the record at the end, and its length in bytes
without comment."""
_SEAL = b"linop sha256 "
_SEALED = len(_SEAL) + 64
_PART = 2**22
"""Bytes that are read at once."""
_TOKEN = "[0-9a-f]{16}"
SHARD = re.compile(rf"__\d+_{_TOKEN}_\d+\.distcp")
"""Names of linop's files in a checkpoint folder."""


def new_token() -> str:
    """Unguessable component of a file name, 16 hexadecimal digits."""
    return secrets.token_hex(8)


@contextmanager
def replacing(path: str | os.PathLike[Any], token: str | None = None) -> Iterator[IO[bytes]]:
    """A file to write and read, which replaces the one at `path` at the end, unless an exception is
    raised. Links are followed, and stay. The new file has the owner, the mode and the extended
    attributes of the one that it replaces; another hard link to that keeps the old contents. Of
    several at once the last one to end stays.

    Args:
        token: of the temporary file's name; a new one by default.

    Raises:
        ArgumentError: the path is empty, or names what is no regular file. OSError: it cannot be
            written, or the file there could not be, or has an owner that the new one cannot get. A
            file at `path` stays.
    """
    path = target(path)
    if not path.parent.is_dir():
        raise NotADirectoryError(f"{str(path.parent)!r} is no folder")
    before = _replaced(path)
    part = path.with_name(f".{_stem(path)}.{token or new_token()}.part")
    # Nobody reads a part who may not read the whole.
    descriptor = _locked(part, 0o666 if before is None else 0o600)
    try:
        with os.fdopen(descriptor, "w+b") as file:
            if before is not None:
                _take_after(descriptor, path, before)
            yield file
            file.flush()
            os.fsync(file.fileno())
            part.replace(path)  # while it is locked
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _stem(path: Path) -> str:
    """The part's name without its token: that of the file, or a digest of a long one."""
    name = os.fsencode(path.name)
    return path.name if len(name) < 200 else hashlib.sha256(name).hexdigest()


def _locked(part: Path, mode: int) -> int:
    """A new file, locked where the file system has locks."""
    while True:
        # O_EXCL: a link at that name is not followed.
        descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return descriptor
        # `clear_partial` of another process came between.
        os.close(descriptor)


def _replaced(path: Path) -> os.stat_result | None:
    """The file that is replaced, which this process may write to; None if there is none."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        return os.fstat(descriptor)
    finally:
        os.close(descriptor)


def take_after(file: Path, other: Path) -> None:
    """As `_take_after`, of two files, where the other is there."""
    with suppress(FileNotFoundError):
        before = other.stat()
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            _take_after(descriptor, other, before)
        finally:
            os.close(descriptor)


def _take_after(descriptor: int, path: Path, before: os.stat_result) -> None:
    """Give a new file the owner, the mode and the extended attributes of another."""
    mine = os.fstat(descriptor)
    if (mine.st_uid, mine.st_gid) != (before.st_uid, before.st_gid):
        try:
            os.fchown(descriptor, before.st_uid, before.st_gid)
        except PermissionError:
            raise PermissionError(
                f"{str(path)!r} belongs to user {before.st_uid}, group {before.st_gid}, and a new "
                f"file in its place would not; remove it first, or save to another path"
            ) from None
    with suppress(OSError):  # not on every file system
        for name in os.listxattr(path):
            os.setxattr(descriptor, name, os.getxattr(path, name))
    os.fchmod(descriptor, stat.S_IMODE(before.st_mode))


def clear_partial(path: Path) -> set[str]:
    """Remove temporary files that killed saves to this path have left.

    Returns:
        The tokens of saves that go on.
    """
    part = re.compile(rf"\.{re.escape(_stem(path))}\.({_TOKEN})\.part")
    alive = set()
    for file in entries(path.parent):
        if (found := part.fullmatch(file.name)) and not _removed(file):
            alive.add(found[1])
    return alive


def entries(folder: Path) -> list[Path]:
    """The files in a folder; none, if this user may write to it and not read it."""
    try:
        return [*folder.iterdir()]
    except PermissionError:
        return []


def _removed(part: Path) -> bool:
    """Remove the part of a killed save; False if the save goes on, or if that cannot be known."""
    try:
        descriptor = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        part.unlink()
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def remove(files: Iterator[Path]) -> None:
    """Remove files; errors are ignored."""
    with suppress(OSError):
        for file in files:
            with suppress(OSError):
                file.unlink()


def sync_folder(folder: Path) -> None:
    """Sync a folder's entries to the disk, if this user may read it."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class View(io.RawIOBase):
    """A byte range of a file, as a read-only stream."""

    def __init__(self, file: IO[bytes], offset: int, length: int) -> None:
        super().__init__()
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = (0, self._at, self._length)[whence]
        self._at = min(max(0, start + offset), self._length)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._offset + self._at)
        data = memoryview(buffer).cast("B")[: self._length - self._at]
        count: int = self._file.readinto(data)  # type: ignore[attr-defined]
        self._at += count
        return count


def _no_limit() -> None:
    """Allow any time."""


def digest_of(stream: Any, check_time: Callable[[], None] = _no_limit) -> str:
    """SHA-256 of the rest of a stream, in hexadecimal.

    Args:
        check_time: called now and then; raises an exception if it takes too long.
    """
    digest = hashlib.sha256()
    while data := stream.read(_PART):
        digest.update(data)
        check_time()
    return digest.hexdigest()


def seal(file: IO[bytes]) -> None:
    """Write the digest of a zip archive to its comment, which other readers of it skip."""
    start = file.seek(-_RECORD, os.SEEK_END)
    record = file.read(_RECORD)
    assert record.startswith(_END) and record.endswith(b"\0\0")
    file.seek(start)
    file.write(record[:-2] + _SEALED.to_bytes(2, "little"))
    file.seek(0)
    digest = digest_of(file)
    file.seek(0, os.SEEK_END)
    file.write(_SEAL + digest.encode())


def check_sealed(file: IO[bytes], path: Path, check_time: Callable[[], None] = _no_limit) -> None:
    """Check a file of `torch.save`: by its digest; where it has none, by its CRCs.

    Args:
        check_time: as for `digest_of`.

    Raises:
        BackendError: it is damaged.
    """
    size = file.seek(0, os.SEEK_END)
    start = max(0, size - _SEALED)
    file.seek(start)
    said = file.read()
    file.seek(0)
    if said.startswith(_SEAL):
        if digest_of(View(file, 0, start), check_time).encode() != said[len(_SEAL) :]:
            raise BackendError(damaged(path, "its digest is another"))
    elif not check_archive(file, str(path), check_time):
        warnings.warn(
            f"{str(path)!r} has neither digests nor CRCs, so it cannot be checked; save it again",
            stacklevel=2,
        )
    file.seek(0)


def check_archive(file: IO[bytes], name: str, check_time: Callable[[], None] = _no_limit) -> bool:
    """Check a zip archive by its CRCs; False if the file is no zip archive.

    Raises:
        BackendError: it is damaged.
    """
    start = file.read(len(_START))
    if not zipfile.is_zipfile(file):
        if start == _START:
            raise BackendError(damaged(name, "the end of the archive is missing"))
        return False
    try:
        with zipfile.ZipFile(file) as archive:
            bad = _other_crc(archive, check_time)
    except (zipfile.BadZipFile, NotImplementedError, OSError, EOFError, zlib.error) as error:
        raise BackendError(damaged(name, str(error))) from error
    if bad is not None:
        raise BackendError(
            damaged(name, f"the CRC of {bad!r} is another")
            + " (or torch wrote none: torch.serialization.set_crc32_options)"
        )
    return True


def _other_crc(archive: zipfile.ZipFile, check_time: Callable[[], None]) -> str | None:
    """Name of the first record with another CRC than the archive says; None without one."""
    for one in archive.infolist():
        try:
            with archive.open(one) as record:
                while record.read(_PART):
                    check_time()
        except zipfile.BadZipFile:
            return one.filename
    return None


def damaged(name: Path | str, why: str) -> str:
    """Text of the error for a damaged file."""
    return f"{str(name)!r} is damaged, and nothing was loaded: {why}"
