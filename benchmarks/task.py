"""What a benchmark job is to do. It imports no MPI: the command that starts jobs must not."""

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
"""Ours where the argument's memory is the result's."""
BY_HAND = "mpi4py Function"
"""An `autograd.Function` of torch's over raw mpi4py."""
PLAN = "plan(x)"
AGREEING = "linop, agreeing"
"""Ours where `linop.layers.fixed_shapes` is not promised."""
GLOO, DTENSOR = "torch gloo", "DTensor"
SEQUENTIAL = "sequential"
MARK = "LINOP-BENCH "
"""Begins the lines that rank 0 prints for the command."""


@dataclass(frozen=True)
class Task:
    """The same for all ranks of a job."""

    only: tuple[str, ...] = ()
    """Parts of names of cases; empty: all."""
    sizes: tuple[int, ...] = ()
    """Bytes a worker; empty: those of each case."""
    largest: int = SIZES[-1]
    """No size above this."""
    seconds: float = 1.0
    """For each comparison, about."""
    peers: bool = False
    """Beside the peers, or beside raw mpi4py alone."""
    program: str = "benchmarks.rank"
    """The module that ranks run."""

    def command(self) -> list[str]:
        """The command line of a rank."""
        return [sys.executable, "-m", self.program, json.dumps(asdict(self))]

    @staticmethod
    def parse(text: str) -> Task:
        """From the command line of a rank."""
        given: dict[str, Any] = json.loads(text)
        lists: Any = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
        return Task(**lists)
