"""Counts of MPI calls, by a preloaded library of wrappers that is generated from ``mpi.h``.

It counts every communication call that starts or completes something, persistent ones and window
synchronisation included; not the polling by MPI_Test and MPI_Iprobe, nor local questions.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

COUNTED = re.compile(
    r"(i?[bsr]?send|i?recv|i?m?probe|i?mrecv|i?sendrecv(_replace)?|start(all)?|wait(all|any|some)?"
    r"|i?(neighbor_)?(barrier|bcast|(all|ex)?reduce|scan|exscan|(all)?gatherv?|scatterv?"
    r"|alltoall[vw]?|allgatherv?|reduce_scatter(_block)?)|put|get|r?accumulate"
    r"|win_(fence|sync|lock|unlock|flush)\w*|comm_(dup|split|create)\w*)(_init)?(_c)?"
)
POLLS = {"iprobe", "improbe"}


def library(folder: Path) -> Path | None:
    """Build the library with the ``mpicc`` beside this Python; None if that fails."""
    mpicc = Path(sys.executable).with_name("mpicc")
    source, built = folder / "count.c", folder / "libcount.so"
    try:
        header = subprocess.run(
            [mpicc, "-E", "-x", "c", "-"],
            input="#include <mpi.h>\n",
            capture_output=True,
            text=True,
            check=True,
        )
        source.write_text(_wrappers(header.stdout))
        subprocess.run(
            [mpicc, "-shared", "-fPIC", "-O1", "-w", "-o", built, source],
            check=True,
            capture_output=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return built


def _wrappers(header: str) -> str:
    """C source: each counted function increments a counter of its own, then calls its PMPI twin."""
    lines, names = ["#include <mpi.h>"], []
    for name, parameters in re.findall(r"\bint\s+MPI_(\w+)\s*\(([^()]*)\)", header):
        lowered = name.lower()
        if not COUNTED.fullmatch(lowered) or lowered in POLLS or name in names:
            continue
        given = [re.sub(r"\[\w*\]", "", p).split()[-1].lstrip("*") for p in parameters.split(",")]
        lines.append(
            f"static long n_{name}; int MPI_{name}({parameters}) "
            f"{{ ++n_{name}; return PMPI_{name}({', '.join(given)}); }}"
        )
        names.append(name)
    table = ", ".join(f'{{"{name}", &n_{name}}}' for name in names)
    lines += [
        f"static struct {{ const char *name; long *count; }} table[] = {{ {table} }};",
        f"int linop_counted(void) {{ return {len(names)}; }}",
        "const char *linop_name(int k) { return table[k].name; }",
        "long linop_count(int k) { return *table[k].count; }",
    ]
    return "\n".join(lines)


def counted(run: Callable[[], Any]) -> dict[str, int] | None:
    """The MPI calls that `run` makes on this rank, by name; None if they are not counted here."""
    loaded = ctypes.CDLL(None)
    if not hasattr(loaded, "linop_counted"):
        return None
    loaded.linop_name.restype = ctypes.c_char_p
    loaded.linop_count.restype = ctypes.c_long
    indices = range(loaded.linop_counted())
    before = [loaded.linop_count(k) for k in indices]
    run()
    after = [loaded.linop_count(k) for k in indices]
    return {
        loaded.linop_name(k).decode().removesuffix("_c"): after[k] - before[k]
        for k in indices
        if after[k] > before[k]
    }
