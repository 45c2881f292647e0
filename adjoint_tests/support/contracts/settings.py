"""Checks of `test_settings`, on ranks: settings that differ, by argument and by variable."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

import linop
from linop.backends.together import builds
from linop.errors import LinopError
from support.contracts.plans import total

if TYPE_CHECKING:
    from mpi4py import MPI

ARGUMENTS: dict[str, tuple[Any, Any]] = {
    "windows": (True, False),
    "collectives": (None, True),
    "sums": ("fixed", "any"),
    "debug": (False, True),
    "wait_limit": (600, 60.0),
}
"""By option: a value of most, and another one."""
VARIABLES = {
    "LINOP_WINDOWS": ("windows=True by default", "0"),
    "LINOP_COLLECTIVES": ("collectives=None by default", "0"),
    "LINOP_SUMS": ("sums='fixed' by default", "any"),
    "LINOP_DEBUG": ("debug=False by default", "1"),
    "LINOP_WAIT_LIMIT": ("wait_limit=600 by default", "inf"),
}


def said(comm: MPI.Comm, **options: Any) -> str:
    """The error of getting a backend; empty if it comes, and works."""
    try:
        backend = linop.backends.get("mpi", comm=comm, **options)
    except LinopError as error:
        return f"{type(error).__name__}: {error}"
    plan = total(comm.size, 3).compile(backend)
    assert plan(np.ones(3)).tolist() == [comm.size] * 3
    return ""


def differences_are_errors(comm: MPI.Comm) -> None:
    """On every rank, in the same words; and the communicator can be used after that."""
    last = comm.size - 1
    others = "worker 0" if last == 1 else f"workers {', '.join(map(str, range(last)))}"
    for option, values in ARGUMENTS.items():
        text = said(comm, **{option: values[comm.rank == last]})
        words = f"{option}={values[1]!r} on worker {last}. Give all workers the same"
        assert text.startswith("BackendError: workers have different settings: "), text
        assert words in text and f" on {others} and " in text, text
    for name, (most, other) in VARIABLES.items():
        os.environ.pop(name, None)
        if comm.rank == last:
            os.environ[name] = other
        text = said(comm)
        os.environ.pop(name, None)
        assert f"{most} on {others} and {name}={other} on worker {last}. Give" in text, text
    assert not said(comm)


def wrong_values_are_told(comm: MPI.Comm) -> None:
    """By the ranks that have right ones, too."""
    last = comm.size - 1
    text = said(comm, sums="some" if comm.rank == last else "fixed")
    at = f"worker {last}: " if last else ""
    assert text == f"ArgumentError: {at}sums: expected fixed, any, exact or tree, given 'some'", (
        text
    )
    text = said(comm, wait_limit=-1)
    assert text.startswith("ArgumentError: wait_limit: expected a number of seconds above 0"), text
    assert not said(comm)


def equal_values_need_not_be_said_alike(comm: MPI.Comm) -> None:
    options = {"windows": True, "wait_limit": 600.0, "debug": False} if comm.rank else {}
    assert not said(comm, **options)


def other_backends_are_told(comm: MPI.Comm) -> None:
    name = "cupy" if comm.rank == 0 else "mpi"
    try:
        linop.backends.get(name, comm=comm)
    except linop.errors.BackendError as error:
        words = "workers have different settings: backend='cupy' on worker 0 and backend='mpi' on"
        assert words in str(error), str(error)
    else:
        raise AssertionError


def other_sources_are_told(comm: MPI.Comm) -> None:
    """On every rank, before any control message; and the communicator can be used after that."""
    mine = builds.digest
    if comm.rank == comm.size - 1:
        builds.digest = lambda: bytes(16)
    try:
        text = said(comm)
    finally:
        builds.digest = mine
    words = "BackendError: workers have different versions of linop, or different sources of it: "
    last, others = comm.size - 1, "worker 0" if comm.size == 2 else "workers 0, 1"
    assert text.startswith(f"{words}{others}: {linop.__version__} of sources "), text
    assert f"; worker {last}: {linop.__version__} of sources 00000000, " in text, text
    assert not said(comm)
