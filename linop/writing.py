"""Files that users name to be written: which are refused, before anything is written.

A regular file, or one that is not there yet, is written; links are followed. A directory, a pipe, a
socket and a device are refused, except standard output, standard error and /dev/null: a pipe that
nobody reads would be waited for, and a device is no place for a result.
"""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from typing import Any

from linop.errors import ArgumentError

_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def target(path: str | bytes | os.PathLike[Any], *, streams: bool = False) -> Path:
    """The file that a path names, with all links followed; it need not be there.

    Args:
        streams: standard output, standard error and /dev/null may be named, too.

    Raises:
        ArgumentError: the path is empty, or names what is no regular file.
    """
    text = os.fsdecode(os.fspath(path))
    if not text:
        raise ArgumentError("'' is no file's name; the path of a file expected")
    if streams and _is_stream(text):
        return Path(text)
    found = Path(os.path.realpath(text))
    try:
        mode = os.stat(text).st_mode  # a pipe in /proc is no file of the path that its link has
    except OSError:  # none yet, or not to be seen: opening it says why
        if text.endswith("/"):
            raise ArgumentError(
                f"{text!r} names a directory; the path of a file expected"
            ) from None
        return found
    if not stat.S_ISREG(mode):
        kind = next((words for test, words in _KINDS if test(mode)), "no file")
        raise ArgumentError(f"{text!r} is {kind}; the path of a regular file expected")
    return found


def write_text(path: str | os.PathLike[Any], text: str) -> None:
    """Write a text to a file, in UTF-8; an existing one keeps its owner and mode.

    Raises:
        ArgumentError: as of `target`. OSError: the file cannot be written.
    """
    target(path, streams=True).write_text(text, encoding="utf-8")


def written(path: str | os.PathLike[Any] | None, text: str) -> str:
    """Write a text to a file, if one is given, and return it.

    Raises:
        ArgumentError: the file cannot be written.
    """
    if path is not None:
        try:
            write_text(path, text)
        except OSError as error:
            raise ArgumentError(f"{path}: cannot be written: {error.strerror or error}") from None
    return text


def _is_stream(path: str) -> bool:
    """True if a path names this process's standard output or error, or /dev/null."""
    try:
        there = os.stat(path)
        if stat.S_ISREG(there.st_mode) or stat.S_ISDIR(there.st_mode):
            return False
        known = [os.stat(os.devnull)]
        known += [
            os.fstat(stream.fileno()) for stream in (sys.__stdout__, sys.__stderr__) if stream
        ]
    except (OSError, ValueError):
        return False
    return any(os.path.samestat(there, one) for one in known)
