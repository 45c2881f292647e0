"""Parameters of the cost model of communication (α-β-γ); no predictions."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from linop.errors import ArgumentError, expect


@dataclass(frozen=True)
class Link:
    """Times, in seconds, of messages over one kind of link. The defaults are round numbers for
    messages over TCP, sent from Python, on Ethernet of 10 Gbit/s.

    Raises:
        ArgumentError: a value is not a number, negative, or not finite.

    Example:
        >>> X = linop.TensorSpace((2,), linop.Partition(2))
        >>> link = linop.planning.Link(latency=1.0, per_byte=0.5)
        >>> network = linop.planning.Network(per_byte_copied=0.0, between=link)
        >>> two = linop.planning.Placement(["a", "b"])
        >>> linop.gather(X).cost(network, two).seconds  # 1 second, and 8 bytes
        5.0
    """

    latency: float = 3e-5
    """α: per message, at each of its two ends, independent of size."""
    per_byte: float = 1e-9
    """β: per byte sent, packing included; and per byte received."""
    per_byte_of_machine: float | None = None
    """Per byte that all workers of a machine send, or receive, together: the rate of its network
    card (max-rate model of Gropp, Olson and Samfass, "Modeling MPI Communication Performance on SMP
    Nodes", 2016). By default `per_byte`: one worker can use all of it."""

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True)
class Network:
    """Times, in seconds, of messages and memory traffic of one worker: α, β and γ as in Thakur,
    Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH" (2005).
    Messages have two levels: those inside a machine, and those between machines.

    The defaults are round numbers for messages sent from Python between machines of this decade.

    Raises:
        ArgumentError: a value is not a number, negative, or not finite.

    Example:
        >>> X = linop.TensorSpace((4,), linop.Partition(4))
        >>> network = linop.planning.Network(latency=1.0, per_byte=0.0, per_byte_copied=0.0)
        >>> linop.gather(X).cost(network).seconds  # worker 0 receives three messages
        3.0
    """

    latency: float = 1e-5
    """α: per message, at each of its two ends, independent of size. By default that of the measured
    choice between one stage and two: in shared memory, on two workers, a sum in shares was faster
    from 64 to 256 KiB on."""
    per_byte: float = 1e-10
    """β: per byte sent, packing included; and per byte received."""
    per_byte_added: float = 1e-10
    """γ: per byte accumulated into a region."""
    per_byte_copied: float = 1e-10
    """Per byte copied inside a worker's memory."""
    between: Link | None = None
    """Messages between machines; None if they are like those inside a machine. Workers are on one
    machine unless a `linop.planning.Placement` says otherwise."""

    def __post_init__(self) -> None:
        _check(self)
        if self.between is not None:
            expect("network: between", self.between, Link)

    def link(self, between: bool) -> Link:
        """The link of messages inside a machine, or between machines."""
        inside = Link(self.latency, self.per_byte)
        return self.between if between and self.between is not None else inside

    @property
    def per_byte_of_machine(self) -> float:
        """Per byte that all workers of a machine send to, or receive from, other machines."""
        if self.between is None:
            return 0
        rate = self.between.per_byte_of_machine
        return self.between.per_byte if rate is None else rate

    def seconds(self, sizes: npt.NDArray[Any], between: npt.NDArray[np.bool_]) -> Any:
        """Time, in seconds, of messages at each end; (n,).

        Args:
            sizes: (n,) bytes.
            between: (n,) True for messages between machines.
        """
        inside, outside = self.link(False), self.link(True)
        latency = np.where(between, outside.latency, inside.latency)
        return latency + np.where(between, outside.per_byte, inside.per_byte) * sizes


def _check(times: Link | Network) -> None:
    """Check that all times are numbers of seconds."""
    what = type(times).__name__.lower()
    for field in fields(times):
        value = getattr(times, field.name)
        if value is None and field.default is None:
            continue
        if field.name != "between" and not (
            isinstance(value, int | float | np.number) and 0 <= value < math.inf
        ):
            raise ArgumentError(
                f"{what}: {field.name} is a number of seconds from 0; given {value!r}"
            )


ASSUMED = Network(between=Link())
"""The network for which sums are split, levels of machines and collectives are chosen, and that is
simulated by default."""
