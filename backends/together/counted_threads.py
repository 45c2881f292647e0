"""Threads of this process, as deadlock detection sees them: those of Python, those that have not
ended, and those that wait for another to end."""

from __future__ import annotations

import sys
import threading
from collections.abc import Collection

_JOIN, _JOIN_GLOBALS = threading.Thread.join.__code__, threading.Thread.join.__globals__


def is_of_python(thread: threading.Thread) -> bool:
    """True if `threading` started the thread, or it is the main thread. A thread started otherwise,
    as by torch for backward passes, works for a thread that waits for it, and counts as that
    one."""
    return not isinstance(thread, threading._DummyThread)


def remaining(threads: set[threading.Thread]) -> list[threading.Thread]:
    """Threads of a set that have not ended; it is left without the others. Threads may add
    themselves meanwhile, so it is changed in place and not iterated over by Python's code."""
    ended = {thread for thread in list(threads) if not thread.is_alive()}
    threads -= ended
    return [thread for thread in list(threads) if thread not in ended]


def joins(thread: threading.Thread, idents: Collection[int]) -> bool:
    """True if a thread waits, without a timeout, for one of these to end (`Thread.join`), directly
    or through others."""
    frames, seen = sys._current_frames(), set[int]()
    while thread.ident is not None and thread.ident not in seen and thread.is_alive():
        if thread.ident in idents:
            return bool(seen)
        seen.add(thread.ident)
        frame = frames.get(thread.ident)
        while frame is not None and frame.f_code is not _JOIN:
            frame = frame.f_back if frame.f_globals is _JOIN_GLOBALS else None
        if frame is None or frame.f_locals["timeout"] is not None:
            return False
        thread = frame.f_locals["self"]
    return False
