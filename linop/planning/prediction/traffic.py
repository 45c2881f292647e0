"""Traffic matrix: messages and bytes between all pairs of workers, computed without running."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy

from linop.errors import expect
from linop.normal_form.boxes import Ints, totals
from linop.normal_form.stages import HasStages
from linop.planning.placement import Placement
from linop.planning.routing import messages, routes
from linop.planning.stage_passes import prepared
from linop.text import aligned

_SHOWN = 16
"""Largest number of rows of a printed matrix; more workers are binned."""


@dataclass(frozen=True, eq=False)
class TrafficMatrix:
    """Messages and bytes between pairs of workers in one application of an operator.

    Example:
        >>> X = linop.TensorSpace((8,), linop.Partition(4))
        >>> print(linop.planning.traffic_matrix(linop.shift(X, 1, periodic=False)))
        bytes from  to 0  to 1  to 2  to 3
                 0     ·    16     ·     ·
                 1     ·     ·    16     ·
                 2     ·     ·     ·    16
                 3     ·     ·     ·     ·
    """

    workers: Ints
    """(n,) workers, in increasing order."""
    messages: Any
    """(n, n) sparse array of messages from row to column: one per stage in which the pair
    communicates."""
    bytes: Any
    """(n, n) sparse array of bytes from row to column."""
    labels: tuple[str, ...] = ()
    """Names of the rows; by default their numbers in `workers`."""

    def by_machine(self, placement: Placement) -> TrafficMatrix:
        """Messages and bytes between machines, as a matrix with a row for each machine; on the
        diagonal those between workers of one machine.

        Raises:
            ArgumentError: a worker has no machine, or `placement` is no `Placement`.
        """
        expect("placement", placement, Placement)
        n, names = len(self.workers), placement.names
        ends = np.arange(n), placement.of(self.workers)
        on = scipy.sparse.coo_array((np.ones(n, np.int64), ends), (n, len(names))).tocsr()
        messages, sizes = ((on.T @ each @ on).tocsr() for each in (self.messages, self.bytes))
        return TrafficMatrix(np.arange(len(names)), messages, sizes, names)

    def binned(self, most: int) -> tuple[np.ndarray, int]:
        """(dense matrix of bytes, width): at most `most` rows and columns, each the sum over
        `width` consecutive workers."""
        n = len(self.workers)
        width = max(1, -(-n // most))
        entries = self.bytes.tocoo()
        rows = -(-n // width)
        cell = entries.row // width * rows + entries.col // width
        return totals(cell, entries.data, rows * rows).reshape(rows, rows), width

    def __str__(self) -> str:
        """Table of bytes from row to column, by ranges of workers if there are many."""
        if not len(self.workers):
            return "no workers"
        dense, width = self.binned(_SHOWN)
        names = self.names(width)
        head = ["bytes from", *(f"to {name}" for name in names)]
        rows = [
            [name, *(str(size) if size else "·" for size in row)]
            for name, row in zip(names, dense.tolist(), strict=True)
        ]
        return "\n".join(aligned([head, *rows]))

    def names(self, width: int) -> list[str]:
        """Labels of the rows of `binned`: a worker, or the first and the last of a range."""
        rows = self.labels or self.workers
        groups = [rows[k : k + width] for k in range(0, len(rows), width)]
        return [str(g[0]) if len(g) == 1 else f"{g[0]}–{g[-1]}" for g in groups]


def traffic_matrix(op: HasStages, placement: Placement | None = None) -> TrafficMatrix:
    """Messages and bytes between all pairs of workers in one application of an operator.

    Whole-array arithmetic over the transfers, as in `linop.simulate`, for tens of thousands of
    workers.

    Args:
        op: the operator.
        placement: the machine of each worker; by default all are on one.

    Raises:
        ArgumentError: a worker has no machine.

    Example:
        >>> X = linop.TensorSpace((6,), linop.Partition(3))
        >>> linop.planning.traffic_matrix(linop.shift(X, 1)).bytes.toarray().tolist()
        [[0, 16, 0], [0, 0, 16], [16, 0, 0]]
    """
    stages = prepared(op.stages, placement)
    workers = np.array(stages.workers, np.int64)
    shape = len(workers), len(workers)
    senders, receivers, sizes = [], [], []
    for movement in stages.movements:
        sender, receiver, elements = messages(routes(movement, placement))
        senders.append(np.searchsorted(workers, sender))
        receivers.append(np.searchsorted(workers, receiver))
        sizes.append(elements * movement.domain.dtype.itemsize)
    ends = np.concatenate(senders), np.concatenate(receivers)
    size = np.concatenate(sizes)
    # tocsr sums the entries of equal indices.
    counts = scipy.sparse.coo_array((np.ones_like(size), ends), shape).tocsr()
    return TrafficMatrix(workers, counts, scipy.sparse.coo_array((size, ends), shape).tocsr())
