"""Consoles of the command line. What is piped has no escape codes, even where variables such as
FORCE_COLOR or GITHUB_ACTIONS ask for colours; nor has what ranks print, whose terminal is one that
``mpiexec`` made and reads; nor what is shown where NO_COLOR is set."""

from __future__ import annotations

import os
import sys
from typing import TextIO

from rich.console import Console

from linop.backends import in_mpi_job


def console(stderr: bool = False) -> Console:
    """A console of stdout, or of stderr."""
    return Console(
        stderr=stderr,
        emoji=False,
        force_terminal=None if _is_terminal(sys.stderr if stderr else sys.stdout) else False,
        color_system=None if os.environ.get("NO_COLOR") else "auto",
    )


def settle_help() -> None:
    """Let typer print help, and errors of usage, by the same rule."""
    from typer import rich_utils

    if not (_is_terminal(sys.stdout) and _is_terminal(sys.stderr)):
        rich_utils.FORCE_TERMINAL = False
    if os.environ.get("NO_COLOR"):
        rich_utils.COLOR_SYSTEM = None


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty() and not in_mpi_job()
