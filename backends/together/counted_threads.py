"""Threads of this process, as deadlock detection sees them: those of Python, those that have not
ended, and those that wait for another to end."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Collection, Mapping
from types import FrameType

_JOIN, _JOIN_GLOBALS = threading.Thread.join.__code__, threading.Thread.join.__globals__


_LOOKING = threading.RLock()
os.register_at_fork(
    before=_LOOKING.acquire, after_in_parent=_LOOKING.release, after_in_child=_LOOKING.release
)


def frames() -> Mapping[int, FrameType]:
    """The frame that each thread executes, by the thread's number.

    Python 3.11 keeps a lock of its own while it makes them. If it collected garbage meanwhile, a
    finalizer might let another thread run, which would wait here for that lock, and let no thread
    run: the process would stand still. So garbage is not collected meanwhile.
    """
    with _LOOKING:
        collects = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()
        finally:
            if collects:
                gc.enable()


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
    executed, seen = frames(), set[int]()
    while thread.ident is not None and thread.ident not in seen and thread.is_alive():
        if thread.ident in idents:
            return bool(seen)
        seen.add(thread.ident)
        frame = executed.get(thread.ident)
        while frame is not None and frame.f_code is not _JOIN:
            frame = frame.f_back if frame.f_globals is _JOIN_GLOBALS else None
        if frame is None or frame.f_locals["timeout"] is not None:
            return False
        thread = frame.f_locals["self"]
    return False
