"""Pairs of a forward function and its adjoint over mpi4py, drawn: uneven gathers and scatters,
all-to-alls with counts, scans, messages, with local steps of NumPy around them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

SUM = MPI.SUM
NAMES = "gathered", "scattered", "exchanged", "reduced", "scanned", "passed", "spread", "split"
FAULTS = "", "", "twice", "first lost", "turned", "not sent"


class Drawn:
    """A pair; both functions and the sizes are of one seed.

    Args:
        seed: of the draw.
        world: the number of ranks.
    """

    def __init__(self, seed: int, world: int) -> None:
        draw = random.Random(seed)
        self.name, self.fault = draw.choice(NAMES), draw.choice(FAULTS)
        self.parts = [draw.randint(0, 4) for _ in range(world)]
        self.counts = [[draw.randint(0, 3) for _ in range(world)] for _ in range(world)]
        self.root, self.step = draw.randrange(world), draw.randrange(world)
        self.local = draw.choice(("", "flip", "double", "matrix"))
        self.world, self.forms = world, ("copies", "copies")

    def __str__(self) -> str:
        about = self.parts, self.counts, self.root, self.step
        return f"{self.name} {about}, {self.local!r}, {self.fault!r}"

    def sizes(self, rank: int) -> tuple[int, int]:
        """Of this rank's argument and result."""
        whole, mine = sum(self.parts), self.parts[rank]
        sent, got = sum(self.counts[rank]), sum(row[rank] for row in self.counts)
        other = self.parts[(rank - self.step) % self.world]
        found = {
            "gathered": (mine, whole),
            "scattered": (whole if rank == self.root else 0, mine),
            "exchanged": (sent, got),
            "reduced": (3, 3 if rank == self.root else 0),
            "scanned": (4, 4),
            "passed": (mine, other),
            "spread": (5 if rank == self.root else 0, 5),
            "split": (4, 4),
        }
        return found[self.name]

    def domain(self, rank: int, world: int) -> Any:
        return self.sizes(rank)[0]

    def codomain(self, rank: int, world: int) -> Any:
        return self.sizes(rank)[1]

    def around(self, x: Any, back: bool) -> Any:
        """The local step: its own adjoint, but for that of the matrix."""
        if self.local == "flip":
            return x[::-1].copy()
        if self.local == "double":
            return 2 * x
        if self.local == "matrix" and len(x) % 2 == 0:
            shape = (2, len(x) // 2) if back else (len(x) // 2, 2)
            return np.ascontiguousarray(x.reshape(shape).T).ravel()
        return x.copy()

    def forward(self, x: Any, comm: Any) -> Any:
        moved: Callable[[Any, Any], Any] = getattr(self, f"_{self.name}")
        return moved(self.around(x, False), comm)

    def adjoint(self, y: Any, comm: Any) -> Any:
        moved: Callable[[Any, Any], Any] = getattr(self, f"_{self.name}_back")
        if self.fault == "not sent":
            x = np.zeros(self.sizes(comm.rank)[0])
            n = min(len(x), len(y))
            x[:n] = y[:n]
        else:
            x = moved(y.copy(), comm)
        if self.fault == "twice":
            x = x * 2
        elif self.fault == "turned":
            x = x[::-1]
        elif self.fault == "first lost":
            x = x.copy()
            x[:1] = 0
        return self.around(x, True)

    # Each movement, and its adjoint

    def _gathered(self, x: Any, comm: Any) -> Any:
        y = np.empty(sum(self.parts))
        comm.Allgatherv(x, [y, self.parts])
        return y

    def _gathered_back(self, y: Any, comm: Any) -> Any:
        x = np.empty(self.parts[comm.rank])
        comm.Reduce_scatter(y, x, recvcounts=self.parts, op=SUM)
        return x

    def _scattered(self, x: Any, comm: Any) -> Any:
        y = np.empty(self.parts[comm.rank])
        comm.Scatterv([x, self.parts] if comm.rank == self.root else None, y, root=self.root)
        return y

    def _scattered_back(self, y: Any, comm: Any) -> Any:
        x = np.empty(self.sizes(comm.rank)[0])
        comm.Gatherv(y, [x, self.parts] if comm.rank == self.root else None, root=self.root)
        return x

    def _exchanged(self, x: Any, comm: Any, back: bool = False) -> Any:
        sent, got = self.counts[comm.rank], [row[comm.rank] for row in self.counts]
        sent, got = (got, sent) if back else (sent, got)
        y = np.empty(sum(got))
        comm.Alltoallv([x, sent], [y, got])
        return y

    def _exchanged_back(self, y: Any, comm: Any) -> Any:
        return self._exchanged(y, comm, True)

    def _reduced(self, x: Any, comm: Any) -> Any:
        y = np.empty(3 if comm.rank == self.root else 0)
        comm.Reduce(x, y if comm.rank == self.root else None, op=SUM, root=self.root)
        return y

    def _reduced_back(self, y: Any, comm: Any) -> Any:
        x = y.copy() if comm.rank == self.root else np.empty(3)
        comm.Bcast(x, root=self.root)
        return x

    def _scanned(self, x: Any, comm: Any) -> Any:
        y = np.empty(4)
        comm.Scan(x, y, op=SUM)
        return y

    def _scanned_back(self, y: Any, comm: Any) -> Any:
        """The sums of what all ranks behind get: the whole sum without those before."""
        total, before = np.empty(4), np.zeros(4)
        comm.Allreduce(y, total, op=SUM)
        comm.Exscan(y, before, op=SUM)
        return total - before if comm.rank else total

    def _passed(self, x: Any, comm: Any, back: bool = False) -> Any:
        step = -self.step if back else self.step
        to, source = (comm.rank + step) % comm.size, (comm.rank - step) % comm.size
        y = np.empty(self.parts[comm.rank] if back else self.parts[source])
        comm.Sendrecv(x, to, 3, y, source, 3)
        return y

    def _passed_back(self, y: Any, comm: Any) -> Any:
        return self._passed(y, comm, True)

    def _spread(self, x: Any, comm: Any) -> Any:
        y = x.copy() if comm.rank == self.root else np.empty(5)
        comm.Ibcast(y, root=self.root).Wait()
        return y

    def _spread_back(self, y: Any, comm: Any) -> Any:
        x = np.empty(5 if comm.rank == self.root else 0)
        comm.Reduce(y, x if comm.rank == self.root else None, op=SUM, root=self.root)
        return x

    def _split(self, x: Any, comm: Any) -> Any:
        part = comm.Split(comm.rank % 2, -comm.rank)
        y = x.copy()
        part.Allreduce(MPI.IN_PLACE, y, op=SUM)
        part.Free()
        return x - 3 * y

    _split_back = _split


def check(seeds: int, path: str) -> None:
    """Check drawn pairs on the ranks of this job; rank 0 writes what was found: of each the draw,
    the report, and True if inner products say that it is a pair."""
    import pickle
    from pathlib import Path

    from linop.testing.parallel.mpi import interception
    from linop.testing.parallel.mpi.functions import Parts
    from linop.testing.parallel.mpi.pairs import checked

    comm = interception.install()
    plain, found = interception.plain_world(), []
    for seed in range(seeds):
        one = Drawn(seed, comm.size)
        functions = one.forward, one.adjoint, one.domain, one.codomain
        report = checked(Parts(*functions, one.forms), comm)
        numbers = np.random.default_rng([seed, comm.rank])
        x, y = (numbers.integers(-1000, 1000, n).astype(float) for n in one.sizes(comm.rank))
        products = one.forward(x.copy(), comm) @ y, x @ one.adjoint(y.copy(), comm)
        totals = [plain.allreduce(each) for each in products]
        found.append((str(one), one.fault, report, totals[0] == totals[1]))
    if not comm.rank:
        Path(path).write_bytes(pickle.dumps(found))
