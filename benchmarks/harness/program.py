"""Program of each rank of a job that `benchmarks.harness.jobs.rows` starts:

    python -m benchmarks.harness.program MODULE FUNCTION [JSON]

calls ``FUNCTION(comm, *arguments)`` of a benchmark's module on all ranks. Rank 0 prints each row
that it yields, in JSON, marked by `MARK`.
"""

from __future__ import annotations

import importlib
import json
import sys

from mpi4py import MPI

from benchmarks.harness.sides import emit


def main(module: str, function: str, arguments: str) -> None:
    comm = MPI.COMM_WORLD
    for row in getattr(importlib.import_module(module), function)(comm, *json.loads(arguments)):
        emit(comm, row)


if __name__ == "__main__":
    main(*sys.argv[1:])
