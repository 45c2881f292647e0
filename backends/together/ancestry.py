"""Processes that a rank has started: they inherit its launcher's variables, and are no ranks.

A launcher gives every rank variables of its own. A process whose parents have the same ones, and
among them one that has loaded MPI or torch, is none of the launcher's: it would join the job in the
place of that one, and wait for ever. Scripts between a launcher and its rank load neither.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path

MPI = "PMIX_NAMESPACE", "PMIX_RANK", "PMI_RANK", "PMI_FD", "PMI_PORT", "MPI_LOCALRANKID"
TORCH = "TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK", "MASTER_PORT"
"""Variables that tell ranks, and jobs, from each other."""
_LIBRARIES = {MPI: (b"libmpi",), TORCH: (b"libtorch", b"libc10")}


@cache
def rank_above(variables: tuple[str, ...]) -> int | None:
    """The rank that has started this process, directly or through others, as a process identifier;
    None without one, or where there is no /proc.

    Args:
        variables: `MPI` or `TORCH`.
    """
    mine = _of(os.environ, variables)
    process = os.getppid()
    while mine and process > 1:
        try:
            theirs = _of(_environment(process), variables)
            if theirs != mine:
                return None
            if _has_loaded(process, _LIBRARIES[variables]):
                return process
            process = _parent(process)
        except (OSError, ValueError):
            return None
    return None


def _of(environment: Mapping[str, str], variables: tuple[str, ...]) -> dict[str, str]:
    return {name: environment[name] for name in variables if name in environment}


def _environment(process: int) -> dict[str, str]:
    """Variables that a process was started with."""
    lines = Path(f"/proc/{process}/environ").read_bytes().decode(errors="replace").split("\0")
    return dict(line.split("=", 1) for line in lines if "=" in line)


def _has_loaded(process: int, libraries: tuple[bytes, ...]) -> bool:
    maps = Path(f"/proc/{process}/maps").read_bytes()
    return any(name in maps for name in libraries)


def _parent(process: int) -> int:
    # After the name of the program, which may have spaces and brackets: state, parent.
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
