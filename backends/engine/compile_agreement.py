"""Collective checks when all workers compile an operator: all built the same one, all could lower
it, and all made the same calls before."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from linop.backends.engine.roads.call_numbers import compare_calls
from linop.backends.together.transport import Counts, Transport
from linop.errors import BackendError, LinopError, restated
from linop.operators.operator import LinearOperator

_SHOWN = 160
"""Longest text of an operator in an error."""


class Said(NamedTuple):
    """Contribution of one worker to the check."""

    digest: bytes
    """Digest of the operator's construction, and of inner products of its ends."""
    plans: int
    """Number of plans compiled so far."""
    wrong: LinopError | None
    """Error raised by lowering."""
    calls: Counts


def check_agreement(
    op: LinearOperator,
    transport: Transport,
    plans: int = 0,
    lowered: object = None,
    calls: Counts | None = None,
) -> int:
    """Check collectively that all workers built the same operator, could lower it, and have made
    the same calls before.

    Args:
        plans: number of plans that this worker has compiled.
        lowered: result of lowering the operator on this worker; an error if it failed.
        calls: calls made on this worker.

    Returns:
        The largest number of plans of any worker: numbers differ if an error interrupted some
            workers.

    Raises:
        BackendError: operators or numbers of calls differ; or the first worker's error in lowering.
            Either on every worker, with the same text.
    """
    meet = partial(transport.gather_all, doing="compile", about=op)
    # First a cheap digest of the construction; equal operators may be constructed in two ways.
    wrong = restated(lowered, str(lowered)) if isinstance(lowered, LinopError) else None
    ends = [s.digest for s in (op.domain, op.codomain) if s.inner_product is not None]
    mine = Said(b"".join([op.stages.digest, *ends]), plans, wrong, dict(calls or {}))
    said = meet(mine)
    digests = [one.digest for one in said]
    if len(set(digests)) > 1:
        digests = meet(b"".join([op.stages.fingerprint, *ends]))
    if len(set(digests)) == 1:
        for worker, one in enumerate(said):
            if one.wrong is not None:
                raise restated(one.wrong, f"worker {worker}, compiling {op!r}: {one.wrong}")
        compare_calls(transport, [one.calls for one in said])
        return max(one.plans for one in said)
    names = meet(repr(op)[:_SHOWN].rstrip())
    built = []
    for known in dict.fromkeys(digests):
        workers = [w for w, digest in enumerate(digests) if digest == known]
        built.append(f"workers {workers} built {names[workers[0]]}")
    raise BackendError(
        f"workers built different operators: {'; '.join(built)}. Build it from the same arguments "
        f"on every worker"
    )
