"""Digests of what workers have done that ride with the messages of data parallel training, so that
the next message tells when one of them has left something out.

A digest is `PLACES` numbers below 128, exact in every dtype that parameters have. Where messages
are gathered, each worker sees those of all; where they are summed, each sends a one for every bit,
and for the complement of every bit: of each pair one sum is zero if all digests are equal, however
the sums are rounded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from linop.backends import Backend
from linop.errors import BackendError
from linop.layers.agreement.input_agreement import agreement_of

Tensor = Any
"""torch is not typed here."""
PLACES = 4
"""Elements of a gathered digest."""
_BITS = 7
SUMMED = 2 * PLACES * _BITS
"""Elements of a summed digest."""
Facts = dict[str, Any]
"""What is compared, in words, with its value on this worker."""


def gathered_digest(facts: Facts, like: Tensor) -> Tensor:
    """A digest of `PLACES` elements, of the dtype and device of a tensor."""
    return like.detach().new_tensor(_places(facts))


def summed_digest(facts: Facts) -> list[float]:
    """A digest of `SUMMED` elements, to be added to those of other workers."""
    bits = [place >> k & 1 for place in _places(facts) for k in range(_BITS)]
    return [float(one) for bit in bits for one in (bit, 1 - bit)]


def _places(facts: Facts) -> list[int]:
    number = int.from_bytes(hashlib.sha256(repr(facts).encode()).digest()[:PLACES], "little")
    return [number >> 8 * k & 127 for k in range(PLACES)]


def are_equal(gathered: Tensor) -> bool:
    """True if all workers' digests, one after the other, are equal."""
    rows = gathered.detach().view(-1, PLACES)
    return bool((rows == rows[0]).all())


def add_up(summed: Sequence[float]) -> bool:
    """True if a sum is of equal digests."""
    return all(one == 0 or other == 0 for one, other in zip(summed[::2], summed[1::2], strict=True))


def different(name: str, facts: Facts, backend: Backend, cure: str) -> BackendError:
    """The error of workers whose digests differ, which says in what. Collective."""
    said = agreement_of(backend).gather_objects(facts, "say what this worker has done", name)
    return BackendError(f"{name}: {'; '.join(_differences(said))}. {cure}")


def _differences(said: Sequence[Facts]) -> list[str]:
    found = []
    for what in said[0]:
        values = [one.get(what) for one in said]
        if any(value != values[0] for value in values):
            each = {repr(value): None for value in values}
            found.append(
                f"{what}: "
                + ", ".join(
                    f"{value} on workers {[w for w, one in enumerate(values) if repr(one) == value]}"
                    for value in each
                )
            )
    return found
