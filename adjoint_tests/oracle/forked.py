"""Checks in a process of their own, which may be killed: some faults never return, or take all
memory."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from linop.errors import LinopError
from oracle.cases import WrongError

MEMORY = 1_500_000_000
"""Bytes of address space that a check may use beyond what its process has."""


def forked(check: Callable[[], None], seconds: float = 50.0) -> None:
    """Run a check in a fork.

    Raises:
        WrongError: the check did, or raised an error that is not linop's, or did not return in
            time. LinopError: the check did.
    """
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ours)
        _run(check, theirs)
    os.close(theirs)
    end, status = time.monotonic() + seconds, None
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        time.sleep(0.005)
    else:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ours)
        raise WrongError(f"not done after {seconds:g} s")
    with os.fdopen(ours, "rb") as pipe:
        kind, _, words = pipe.read().decode(errors="replace").partition(":")
    if kind == "refused":
        raise LinopError(words)
    if kind != "right":
        raise WrongError(words or f"the process died, status {status}")


def _run(check: Callable[[], None], pipe: int) -> None:
    """Run the check, and write its outcome; ends the process."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    try:
        check()
        said = "right:"
    except LinopError as error:
        said = f"refused:{type(error).__name__}: {error}"
    except WrongError as error:
        said = f"wrong:{error}"
    except BaseException as error:
        said = f"wrong:raw {type(error).__name__}: {error}"
    try:
        os.write(pipe, said.encode()[:4000])
    finally:
        sys.stdout.flush()
        os._exit(0)
