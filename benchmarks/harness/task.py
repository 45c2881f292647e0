"""Parameters of a benchmark job, and names of its sides. It imports no MPI: the command that starts
jobs must not."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from typing import Any

KIB, MIB = 1024, 1024**2
SIZES = (KIB, 64 * KIB, MIB, 16 * MIB)
"""Bytes of a worker's block (of the domain, on the workers that hold one)."""
RAW = "raw mpi4py"
ROOT_COPIES = "raw, root copies"
FLOOR = "one strided copy"
ONE_BUFFER = "linop, one buffer"
"""linop's side with one buffer for argument and result."""
BY_HAND = "mpi4py Function"
"""An `autograd.Function` of torch's over raw mpi4py."""
HAND_COPIES = "mpi4py Function, root copies"
"""The same, whose root's result is new memory, as linop's is; `BY_HAND` returns its argument."""
PLAN = "plan(x)"
PROMISED = "linop, fixed shapes"
"""linop's side inside of `linop.layers.fixed_shapes`."""
EMPTY = "empty Function"
"""An `autograd.Function` that returns its argument."""
BOTH = "plan(x) and empty Function"
"""Both, one after the other."""
GLOO, DTENSOR = "torch gloo", "DTensor"
SEQUENTIAL = "sequential"
MARK = "LINOP-BENCH "
"""Prefix of the lines that rank 0 prints for the command."""


@dataclass(frozen=True)
class Task:
    """Parameters of a job, equal on all its ranks."""

    only: tuple[str, ...] = ()
    """Substrings of the names of cases to run; empty: all."""
    sizes: tuple[int, ...] = ()
    """Bytes a worker; empty: those of each case."""
    largest: int = SIZES[-1]
    """Largest size in bytes."""
    seconds: float = 1.0
    """Approximate duration of each comparison."""
    peers: bool = False
    """True: also compare with the peers."""
    pinned: bool = False
    """True: each rank stays on one core, for machines on which others work too."""
    program: str = "benchmarks.movement.rank"
    """The module that ranks run."""

    def command(self) -> list[str]:
        """The command line of a rank."""
        return [sys.executable, "-m", self.program, json.dumps(asdict(self))]

    @staticmethod
    def parse(text: str) -> Task:
        """The task in the JSON of a rank's command line."""
        given: dict[str, Any] = json.loads(text)
        lists: Any = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
        return Task(**lists)
