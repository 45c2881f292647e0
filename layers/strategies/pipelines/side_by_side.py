"""Pipelines side by side, whose stages wait for each other: in sharded or tensor-parallel modules
across them. Forwards and backwards of a stage are the same on all workers across if the schedules
are, and the numbers of micro-batches: then one order of all messages, the schedule's, is that of
every worker, and no wait goes round in a circle. These are compared before the first message."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from linop.errors import BackendError
from linop.layers.agreement.input_agreement import Cache, InputAgreement, agreement_of
from linop.strategies.mesh import Axis
from linop.strategies.pipelines.stages.stage_backends import axes_across

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
        self._axes = _joined(axes)
        mine = bool(self._axes), any(same for _, same in self._axes)
        said = agreement.gather_objects(mine, "construct linop.strategies.Pipeline")
        self.any = any(across for across, _ in said)
        """True if some stage is parallel across pipelines; else there is nothing to agree on."""
        self.traces_alone = not any(same for _, same in said)
        """True if the shapes of a stage's outputs are found without the others."""
        self._known = Cache[bool](_CACHE_SIZE)

    @staticmethod
    @contextmanager
    def telling(stages: Any) -> Iterator[None]:
        """Context of a construction that raises on all workers of this pipeline, or on none, and
        ends with a call of others (`agreed`): they hear of an error. Collective then.

        Args:
            stages: as they were given.
        """
        try:
            yield
        except Exception as error:
            given = stages if isinstance(stages, Iterable) else ()
            modules = [m for m in given if isinstance(m, torch.nn.Module)]
            _tell(_joined(map(axes_across, modules)), error)
            raise

    @contextmanager
    def agreed(self, doing: str, sizes: Callable[[], Sequence[int]] = tuple) -> Iterator[None]:
        """Context of work that raises on all workers of this pipeline, or on none. At its end the
        call is compared with those of other pipelines. Collective.

        Args:
            doing: what is called, in words.
            sizes: rows of the micro-batches, after the work.

        Raises:
            BackendError: others make another call, or have failed; on every worker of all.
        """
        try:
            yield
        except Exception as error:
            _tell(self._axes, error)
            raise
        if not self.any:
            return
        words = ""
        for axis, same in self._axes:
            rows = tuple(sizes())
            said = doing, len(rows), rows if same else (), self._digest
            words = words or self._compared(axis, said)
        if self._agreement.sum(bool(words), "call linop.strategies.Pipeline"):
            every = self._agreement.gather_objects(words, "call linop.strategies.Pipeline")
            raise BackendError(next(filter(None, every)))

    def _compared(self, axis: Axis, mine: Any) -> str:
        """The difference to the calls of workers across, in words. Collective among them."""
        total = _total(axis, mine)
        if (axis, total) in self._known:
            return ""
        words = _difference(axis, mine)
        if not words:
            self._known.keep((axis, total), True)
        return words


def _tell(axes: Iterable[tuple[Axis, bool]], error: Exception) -> None:
    """Let workers across, who compare their calls, hear of an error. Collective among them."""
    for axis, _ in axes:
        _total(axis, str(error))
        _difference(axis, str(error))


def _total(axis: Axis, mine: Any) -> int:
    said: Any = "pipelines side by side", mine
    return agreement_of(axis.backend).total(0, said)


def _joined(axes: Iterable[Mapping[Axis, bool]]) -> list[tuple[Axis, bool]]:
    """Axes across a worker's stages, in one order on all workers."""
    every: dict[Axis, bool] = {}
    for of_stage in axes:
        for axis, same in of_stage.items():
            every[axis] = same or every.get(axis, False)
    return sorted(every.items(), key=lambda pair: pair[0].name)


def _difference(axis: Axis, mine: Any) -> str:
    """The difference to what workers across do, in words; an error's text if it is one. Collective
    among them."""
    doing = "call linop.strategies.Pipeline side by side"
    every = agreement_of(axis.backend).gather_objects(mine, doing)
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
    return ""


def _described(call: tuple[str, int, tuple[int, ...], str]) -> str:
    doing, count, sizes, digest = call
    micro_batches = f" of {count} micro-batches" if count else ""
    rows = f" of {list(sizes)} rows" if sizes else ""
    return f"{doing}{micro_batches}{rows} (schedule {digest[:6]})"
