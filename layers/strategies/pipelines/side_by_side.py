"""Pipelines side by side, whose stages wait for each other: in sharded or tensor-parallel modules
across them. Forwards and backwards of a stage are the same on all workers across if the schedules
are, and the numbers of micro-batches: then one order of all messages, the schedule's, is that of
every worker, and no wait goes round in a circle. These are compared before the first message."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from linop.errors import BackendError, LinopError
from linop.layers.agreement.input_agreement import Cache, InputAgreement, agreement_of
from linop.strategies.mesh import Axis

_CACHE_SIZE = 256


class SideBySide:
    """Agreement of pipelines side by side on each call. Constructed by all workers of each.

    Args:
        agreement: of the workers of this pipeline.
        digest: of its schedule.
        axes: across this worker's stages, and True where their tensors have one shape.
    """

    def __init__(
        self, agreement: InputAgreement, digest: str, axes: Iterable[Mapping[Axis, bool]]
    ) -> None:
        self._agreement, self._digest = agreement, digest
        every: dict[Axis, bool] = {}
        for of_stage in axes:
            for axis, same in of_stage.items():
                every[axis] = same or every.get(axis, False)
        self._axes = sorted(every.items(), key=lambda pair: pair[0].name)
        said = agreement.gather_objects(bool(every), "construct linop.strategies.Pipeline")
        self._any = any(said)
        self._known = Cache[bool](_CACHE_SIZE)

    def agree(self, trains: bool, sizes: Sequence[int], problem: LinopError | None) -> None:
        """Compare a call with those of other pipelines. Collective.

        Args:
            trains: True for a step.
            sizes: rows of the micro-batches.
            problem: the error of this call on all workers of this pipeline, or None.

        Raises:
            BackendError: others make another call, or have a problem; on every worker of all.
        """
        if not self._any:
            return
        words = ""
        for axis, same in self._axes:
            said: Any = trains, len(sizes), tuple(sizes) if same else (), self._digest
            words = words or self._compared(axis, str(problem) if problem else said)
        if problem is None and self._agreement.sum(bool(words)):
            every = self._agreement.gather_objects(words, "call linop.strategies.Pipeline")
            raise BackendError(next(filter(None, every)))

    def _compared(self, axis: Axis, mine: Any) -> str:
        """The difference to the calls of workers across, in words. Collective among them."""
        agreement = agreement_of(axis.backend)
        total = agreement.total(0, ("pipelines side by side", mine))  # type: ignore[arg-type]
        if (axis, total) in self._known:
            return ""
        every = agreement.gather_objects(mine, "call linop.strategies.Pipeline side by side")
        failed = [(k, one) for k, one in enumerate(every) if isinstance(one, str)]
        if failed:
            k, error = failed[0]
            return f"Pipeline: that of {k} along {axis.name!r} failed: {error}"
        if any(one != every[0] for one in every):
            each = ", ".join(f"{k} has {_described(one)}" for k, one in enumerate(every))
            return (
                f"Pipeline: its stages are parallel along {axis.name!r}, where {each}; the same "
                f"expected, with one schedule: its sharded and tensor-parallel modules wait for "
                f"each other"
            )
        self._known.keep((axis, total), True)
        return ""


def _described(call: tuple[bool, int, tuple[int, ...], str]) -> str:
    trains, count, sizes, digest = call
    what = "a step" if trains else "an evaluation"
    rows = f" of {list(sizes)} rows" if sizes else ""
    return f"{what} of {count} micro-batches{rows} (schedule {digest[:6]})"
