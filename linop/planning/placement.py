"""Placement of workers on machines, given as data or read from a machine file of MPI's."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from linop.caching import cached_property
from linop.errors import ArgumentError
from linop.normal_form.boxes import Ints
from linop.text import read_text

_LINE = re.compile(
    r"(?P<host>\[[^\s\]]+\]|[^\s:=]+)"
    r"(?::(?P<many>\d{1,9})|(?:\s+(?!slots=)[\w-]+=\S+)*\s+slots=(?P<slots>\d{1,9}))?"
    r"(?:\s+(?!slots=)[\w-]+=\S+)*"
)
"""A line of a machine file, with no spaces around ``=``."""
_MOST = 10_000_000
"""Largest number of workers in a machine file."""


class Placement:
    """The machine of each worker.

    Args:
        machines: (n,) machine of each worker, from worker 0 on: numbers, or names. Workers with
            equal entries are on one machine.

    Raises:
        ArgumentError: the entries are not all numbers or all names.

    Example:
        >>> X = linop.TensorSpace((4,), linop.Partition(4))
        >>> two = linop.planning.Placement.of_blocks(workers=4, per_machine=2)
        >>> two.machines.tolist()
        [0, 0, 1, 1]
        >>> linop.shift(X, 1).cost(placement=two).bytes_between_machines
        16
    """

    def __init__(self, machines: Sequence[int] | Sequence[str] | Ints) -> None:
        try:
            given: Any = np.asarray(machines)
        except ValueError:
            given = np.zeros((), object)
        alike = given.ndim == 1 and (
            given.dtype.kind in "iu"
            or (given.dtype.kind == "U" and all(isinstance(one, str) for one in machines))
        )
        if not alike:
            raise ArgumentError(
                f"placement: expected a machine for each worker, numbers or names such as "
                f"[0, 0, 1, 1]; given {machines!r}"
            )
        names, first, which = np.unique(given, return_index=True, return_inverse=True)
        order = np.argsort(first)
        self.names: tuple[str, ...] = tuple(map(str, names[order].tolist()))
        """The machines, by first appearance."""
        self.machines: Ints = np.argsort(order)[which].astype(np.int64)
        """(n,) number of each worker's machine, an index into `names`."""
        self.machines.flags.writeable = False

    @staticmethod
    def of_blocks(workers: int, per_machine: int) -> Placement:
        """Consecutive workers on each machine: the first `per_machine` on machine 0, and so on.

        Raises:
            ArgumentError: a number is not positive.

        Example:
            >>> linop.planning.Placement.of_blocks(workers=5, per_machine=2).machines.tolist()
            [0, 0, 1, 1, 2]
        """
        for what, number in (("workers", workers), ("workers per machine", per_machine)):
            if not (isinstance(number, int | np.integer) and number > 0):
                raise ArgumentError(f"placement: {what} is a number from 1; given {number!r}")
        return Placement(np.arange(workers) // per_machine)

    @staticmethod
    def read(path: str | Path) -> Placement:
        """The placement of a machine file: each line gives a host and its number of consecutive
        workers, as ``host slots=2`` (Open MPI), ``host:2`` (MPICH), or ``host`` for one worker.
        ``#`` begins a comment. A host may have several lines.

        Raises:
            ArgumentError: the file cannot be read, has no host, or has another line.
        """
        try:
            text = read_text(path)
        except (OSError, TypeError, UnicodeDecodeError) as error:
            raise ArgumentError(f"machine file {path}: cannot be read: {error}") from None
        hosts: list[str] = []
        for number, line in enumerate(text.splitlines(), 1):
            words = re.sub(r"\s*=\s*", "=", line.split("#")[0].strip())
            if not words:
                continue
            found = _LINE.fullmatch(words)
            if found is None:
                raise ArgumentError(
                    f"machine file {path}, line {number}: expected 'host', 'host slots=2' or "
                    f"'host:2'; given {line!r}"
                )
            many = int(found["slots"] or found["many"] or 1)
            if len(hosts) + many > _MOST:
                raise ArgumentError(
                    f"machine file {path}, line {number}: more than {_MOST} workers; given {line!r}"
                )
            hosts += [found["host"]] * many
        if not hosts:
            raise ArgumentError(f"machine file {path}: no host has a slot")
        return Placement(hosts)

    def of(self, workers: Ints) -> Ints:
        """The machine of each of some workers.

        Raises:
            ArgumentError: a worker has no machine.
        """
        if int(workers.max(initial=-1)) >= len(self):
            raise ArgumentError(
                f"placement: of {len(self)} workers, and worker {workers.max()} takes part; give "
                f"the machine of every worker"
            )
        return self.machines[workers]

    def spans(self, workers: Sequence[int]) -> bool:
        """True if workers are on several machines."""
        found = self.of(np.array(workers, np.int64))
        return bool((found != found[:1]).any())

    def __len__(self) -> int:
        """Number of workers."""
        return len(self.machines)

    def __repr__(self) -> str:
        if len(self) <= 16:
            return f"Placement({self.machines.tolist()})"
        return f"Placement({len(self)} workers on {len(self.names)} machines)"

    @cached_property
    def _key(self) -> bytes:
        return self.machines.tobytes()

    def __eq__(self, other: object) -> bool:
        """True if the same workers are together, whatever the names of their machines."""
        return isinstance(other, Placement) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)
