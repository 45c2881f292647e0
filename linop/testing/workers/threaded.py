"""Property tests on threads: one example by `linop.launch`, with a timeout.

A thread cannot be ended: a stuck one stays until the process ends. If it also holds the
interpreter, as an endless loop in C does, the watchdog ends the process.
"""

from __future__ import annotations

import pickle
import threading
import traceback
import warnings
from typing import Any

from linop import backends
from linop.backends.engine.base import Backend
from linop.backends.threads.group import AbortedError
from linop.backends.together.counted_threads import frames
from linop.errors import DeadlockError
from linop.testing.workers.located import Located
from linop.testing.workers.located import __file__ as located_file
from linop.testing.workers.outcome import Outcome
from linop.testing.workers.rank import Answer, lingering_thread, quiet_assume, verdict, words
from linop.testing.workers.stacks import labelled, last_resort

_LEFT = "A thread cannot be ended: those that are stuck stay until this process ends."
_MORE = 2.0
"""Seconds after the timeout at which the process is ended if it has not returned to Python."""


def ask(example: str, located: Located, data: bytes, workers: int, watch: float) -> Outcome:
    """The outcome of a function on one thread per worker.

    Args:
        example: its name, for reports.
        located: the function.
        data: its arguments, pickled; each thread unpickles its own.
        workers: the number of threads.
        watch: timeout in seconds.
    """
    threads: dict[int, threading.Thread] = {}
    answers: dict[int, Answer | None] = {}
    notes: list[str] = []

    def main(backend: Backend) -> None:
        worker = backend.worker or 0
        threads[worker] = threading.current_thread()
        answers[worker] = _played(located, backend, data)

    def start() -> None:
        try:
            backends.launch(main, workers, "threads")
        except DeadlockError as error:
            notes.append(str(error))

    before = set(threading.enumerate())
    with last_resort(watch + _MORE, end=True), warnings.catch_warnings():
        quiet_assume()
        runner = threading.Thread(target=labelled(example, start), daemon=True)
        runner.start()
        runner.join(watch)
        if runner.is_alive():
            notes.append(_LEFT)
        elif left := lingering_thread(before):
            answers[0] = Answer("failed", left)
    stacks = {w: _stack(thread) for w, thread in threads.items() if w not in answers}
    return Outcome(example, workers, dict(answers), stacks, "\n".join(notes), "threads")


def _played(located: Located, backend: Backend, data: bytes) -> Answer:
    try:
        located.on(backend, None, pickle.loads(data))
    except AbortedError as error:
        return Answer("stuck", words(error))
    except BaseException as error:
        return verdict(error)
    return Answer()


def _stack(thread: threading.Thread) -> str:
    """The stack of a thread as text, from the test's frame on; empty if the thread has ended."""
    frame: Any = frames().get(thread.ident or 0)
    if frame is None:
        return ""
    stack = traceback.extract_stack(frame)
    ours = [k for k, one in enumerate(stack) if one.filename == located_file]
    return "".join(traceback.format_list(stack[max(ours, default=-1) + 1 :]))
