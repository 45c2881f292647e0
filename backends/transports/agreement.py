"""Agreement of all workers on an operator when they compile it: all built the same, could lower it,
and made the same calls before."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from linop.backends.transports.transport import Transport, rebuilt
from linop.errors import BackendError, LinopError
from linop.operators.operator import LinearOperator

_SHOWN = 160
"""Bytes of an operator's text in an error."""


class Said(NamedTuple):
    """What a worker says of itself where all compile an operator."""

    digest: bytes
    """Of how it made the operator."""
    plans: int
    """How many it has compiled."""
    wrong: tuple[str, str] | None
    """The class and the text of the error that lowering it raised."""
    calls: dict[tuple[int, ...], int | None]
    """How many it has made of the plans of some workers since all compiled last, where that is to
    be the same for all of these."""


def check_agreement(
    op: LinearOperator,
    transport: Transport,
    plans: int = 0,
    lowered: object = None,
    calls: Mapping[tuple[int, ...], int | None] | None = None,
) -> int:
    """Check, together, that all workers built the same operator, could lower it, and have made the
    same calls before.

    Args:
        plans: how many plans this worker has compiled.
        lowered: what came of lowering it here: an error, or something else.
        calls: how many it has made of the plans of some workers; None where that is not compared.

    Returns:
        The most that one of them has: an error may have left some behind.

    Raises:
        BackendError: they did not; or the first worker's error in lowering it. Either on every
            worker, in the same words.
    """
    meet = partial(transport.gather_all, doing="compile", about=op)
    # First a cheap digest of how it was made; the same operator may have been made in two ways.
    wrong = (type(lowered).__name__, str(lowered)) if isinstance(lowered, LinopError) else None
    mine = Said(op.stages.digest, plans, wrong, dict(calls or {}))
    said = [Said(*pickle.loads(one)) for one in meet(pickle.dumps(tuple(mine)))]
    digests = [one.digest for one in said]
    if len(set(digests)) > 1:
        digests = meet(op.stages.fingerprint)
    if len(set(digests)) == 1:
        for worker, one in enumerate(said):
            if one.wrong is not None:
                kind, text = one.wrong
                raise rebuilt(kind, f"worker {worker}, compiling {op!r}: {text}")
        check_calls([one.calls for one in said])
        return max(one.plans for one in said)
    names = meet(repr(op).encode()[:_SHOWN])
    built = []
    for known in dict.fromkeys(digests):
        workers = [w for w, digest in enumerate(digests) if digest == known]
        name = names[workers[0]].decode(errors="ignore").rstrip()
        built.append(f"workers {workers} built {name}")
    raise BackendError(
        f"workers built different operators: {'; '.join(built)}. Build it from the same arguments "
        f"on every worker"
    )


def check_calls(said: Sequence[Mapping[tuple[int, ...], int | None]]) -> None:
    """Check that workers made the same calls of the plans that they have together.

    Raises:
        BackendError: one left out a call, or made one more; on every worker.
    """
    for group in sorted({group for one in said for group in one}):
        made = [(w, many) for w in group if (many := said[w].get(group)) is not None]
        if len({many for _, many in made}) > 1:
            each = ", ".join(f"{many} on worker {w}" for w, many in made)
            raise BackendError(
                f"workers are out of step: of plans of workers {list(group)} they have made other "
                f"numbers of calls since they last compiled: {each}; one of them left out a call, "
                f"or made one more. Call the same plans in the same order on every worker"
            )
