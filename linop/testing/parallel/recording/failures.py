"""Errors of processes that have not written what they recorded, in words: which rank failed by
itself, which ones lost it, and where those are that wait."""

from __future__ import annotations

import linecache
import re
import signal
from collections.abc import Mapping
from pathlib import Path

from linop.errors import ArgumentError, BackendError
from linop.testing.parallel.findings import ranks_text
from linop.testing.parallel.libraries import folders

_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Connection refused",
)
"""In errors of ranks whose connection to another one has ended."""
_FRAME = re.compile(r'File "([^"]+)", line (\d+) in ')
_THREAD = re.compile(r"^(?=Thread |Current thread )", re.MULTILINE)


def failure(
    folder: Path, workers: int, seconds: float, ended: Mapping[int, int | None] | None = None
) -> Exception:
    """The reason why a process has written no record.

    Args:
        folder: where ranks write errors, ``0.error``, and their stacks, ``0.stack``.
        ended: the statuses of processes that have ended by themselves.
    """
    errors = {r: folder / f"{r}.error" for r in range(workers)}
    texts = {r: path.read_text() for r, path in errors.items() if path.exists()}
    plain = {r: text for r, text in texts.items() if not text.startswith("Traceback")}
    if plain:
        rank, text = min(plain.items())
        return ArgumentError(f"rank {rank}: {text}")
    stacks = {r: (folder / f"{r}.stack").read_text() for r in range(workers)
              if (folder / f"{r}.stack").exists()}  # fmt: skip
    places = {r: where(stack) for r, stack in stacks.items() if stack}
    for rank, status in (ended or {}).items():
        if rank not in texts and status not in (None, 0):
            assert status is not None
            texts[rank] = f"its process has ended {_ending(status)}"
    if texts:
        return BackendError(_failed(texts, places))
    waiting = [f"rank {r} is at {place}" for r, place in places.items() if place]
    listed = [f"rank {r}:\n{_of_program(stack)}" for r, stack in stacks.items() if stack]
    head = (
        f"the program did not end within {seconds:g} s: some ranks wait for others that do not "
        f"come (or it needs more time: give more seconds)."
    )
    return BackendError("\n".join([head, *waiting, "Their stacks:", *listed]))


def _ending(status: int) -> str:
    if status == -signal.SIGKILL:
        return "by signal 9: somebody has killed it, as the system does where memory runs out"
    return f"by signal {-status}" if status < 0 else f"with status {status}"


def _failed(texts: Mapping[int, str], places: Mapping[int, str]) -> str:
    """The errors of ranks that failed by themselves, and in short those that follow from them."""
    lost = {r: text for r, text in texts.items() if any(words in text for words in _LOST)}
    own = {r: text for r, text in texts.items() if r not in lost} or lost
    lines = [f"{ranks_text(tuple(own))} of the program failed:"]
    lines += [f"rank {rank}: {text.rstrip()}" for rank, text in own.items()]
    for rank in sorted({*lost, *places} - set(own)):
        at = places.get(rank) or _of_traceback(texts.get(rank, ""))
        did = "lost its connection to it" if rank in lost else "waited"
        lines.append(f"rank {rank} {did}" + f" at {at}" * bool(at))
    return "\n".join(lines)


def _of_program(stack: str) -> str:
    """Stacks without the thread that ends a rank with who started it."""
    threads = (each for each in _THREAD.split(stack) if "_ends_with_its_parent" not in each)
    return "".join(threads).rstrip()


def where(stack: str) -> str:
    """The innermost line of the program in the stacks of a process, as `faulthandler` writes them,
    ``file:line: text``; empty if there is none."""
    for thread in _THREAD.split(stack):
        if found := _innermost(thread):
            return found
    return ""


def _innermost(frames: str) -> str:
    """The first line of the program in a list of frames; empty if there is none."""
    hidden = ("<", *folders("torch", "numpy"))
    for path, line in _FRAME.findall(frames):
        if not path.startswith(hidden):
            text = linecache.getline(path, int(line)).strip()
            return f"{Path(path).name}:{line}: {text}"
    return ""


def _of_traceback(text: str) -> str:
    """The innermost line of the program in a traceback."""
    frames = [line.replace(", in ", " in ") for line in text.splitlines() if 'File "' in line]
    return _innermost("\n".join(reversed(frames)))
