"""A pipeline's call, agreed upon by all workers: sizes of micro-batches, shapes of all stages, and
the compiled edges for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linop.backends import Backend
from linop.errors import ArgumentError, BackendError, DTypeError, LinopError, restated
from linop.layers.agreement.input_agreement import Cache, InputAgreement, agreement_of
from linop.layers.agreement.metadata import Meta, call_metadata, space_of
from linop.spaces.partition import Partition, balanced
from linop.spaces.tensor import TensorSpace
from linop.strategies.pipelines.construction import Plan
from linop.strategies.pipelines.execution import Pair
from linop.strategies.pipelines.lanes import Edge, Moved, carrier
from linop.strategies.pipelines.stages.stage import Stage
from linop.strategies.pipelines.stages.stage_backends import within


class Call(NamedTuple):
    """One worker's call."""

    tensors: tuple[Meta, ...]
    """Metadata of input and target."""
    trains: bool
    """True for a step."""
    autocast: str
    """Its dtype; empty if it is off."""
    modes: tuple[tuple[bool, ...], ...]
    """Training modes of its stages' submodules."""
    gradients: bool
    """True if they are enabled, or not needed."""
    sizes: tuple[int, ...] | str | None
    """Of micro-batches; text if they are none."""
    pipeline: int
    """Its number."""
    broken: str
    """The error of an earlier call, if there was one."""

    @classmethod
    def of(
        cls,
        tensors: tuple[Meta, ...],
        trains: bool,
        device: str,
        stages: Iterable[Stage],
        sizes: Any,
        pipeline: int,
        broken: str,
    ) -> Call:
        """This worker's call, with torch's modes as they are.

        Args:
            device: that of autocast.
            stages: of this worker.
            sizes: as the user gives them.
        """
        cast = str(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else ""
        modes = tuple(stage.modes for stage in stages)
        enabled = not trains or torch.is_grad_enabled()
        return cls(tensors, trains, cast, modes, enabled, _numbers(sizes), pipeline, broken)


def _numbers(sizes: Any) -> tuple[int, ...] | str | None:
    """Sizes of micro-batches that a user gives, or, if they are no numbers, a description."""
    try:
        return None if sizes is None else tuple(map(index, sizes))
    except Exception:  # of whatever the user gives: all workers are to hear of it
        return repr(sizes)


class Tracing:
    """State shared by calls of a pipeline: the compiled edges by sizes of micro-batches."""

    def __init__(
        self,
        plan: Plan,
        backend: Backend,
        parts: Mapping[int, Backend],
        agreement: InputAgreement,
        most: int,
    ) -> None:
        self.plan = plan
        self.backend = backend
        self.parts = parts
        self.agreement = agreement
        self.edges = Cache[Mapping[Pair, Sequence[Edge]]](most)


class Tracer:
    """All workers' calls, checked; the same on every worker.

    Args:
        calls: by worker.
        stages: of this worker.

    Raises:
        ArgumentError, BackendError: they do not fit together; on every worker.
    """

    def __init__(
        self, calls: Sequence[Call], tracing: Tracing, stages: Mapping[int, Stage]
    ) -> None:
        self._calls = calls
        self._tracing = tracing
        self._plan = tracing.plan
        self._stages = stages
        for worker, call in enumerate(calls):
            if call.broken:
                raise BackendError(
                    f"Pipeline: an earlier call failed on worker {worker}: {call.broken}; make "
                    f"another one"
                )
        for what, each in (
            ("another pipeline", [call.pipeline for call in calls]),
            ("step on some, and evaluation", [call.trains for call in calls]),
            ("other autocast", [call.autocast for call in calls]),
            ("other sizes", [call.sizes for call in calls]),
        ):
            off = [w for w, one in enumerate(each) if one != each[0]]
            if off:
                raise BackendError(f"Pipeline: {what} on workers {off}; the same expected on all")
        without = [w for w, call in enumerate(calls) if not call.gradients]
        if without:
            raise ArgumentError(
                f"Pipeline: step on workers {without} under torch.no_grad or inference_mode, but "
                f"it computes gradients; call the pipeline, as pipe(x), to evaluate"
            )
        self._metas = [call.tensors[0] for call in calls]
        self.input = self._moved("Pipeline", self._plan.grid(0), self._metas)
        self.rows = self.input.shape[0] if self.input.shape else 0
        self._check_targets()
        self.sizes = self._sizes(calls[0].sizes)

    @property
    def _arrays(self) -> Any:
        return self._tracing.backend.arrays

    def _check_targets(self) -> None:
        last = self._plan.grid(self._plan.stages - 1)
        for worker in last.workers:
            meta = self._calls[worker].tensors[1]
            if meta is not None and (len(meta) == 1 or not meta[0] or meta[0][0] != self.rows):
                given = meta[0] if len(meta) == 1 else f"a tensor of shape {tuple(meta[0])}"
                raise ArgumentError(
                    f"Pipeline: target on worker {worker}: {given} given; a tensor of {self.rows} "
                    f"rows expected, as the input has"
                )

    def _sizes(self, given: Sequence[int] | str | None) -> Sequence[int]:
        """Rows of each micro-batch."""
        count = self._plan.table.micro_batches
        if not self._calls[0].trains and given is None and self.rows:
            count = min(count, self.rows)
        if given is None:
            if self.rows < count:
                raise ArgumentError(
                    f"Pipeline: a batch of {self.rows} rows cannot be split into the {count} "
                    f"micro-batches of the schedule; give more rows, or a schedule of fewer"
                )
            return balanced(self.rows, count)
        if (
            isinstance(given, str)
            or len(given) != count
            or sum(given) != self.rows
            or min(given) < 1
        ):
            what = given if isinstance(given, str) else list(given)
            raise ArgumentError(
                f"Pipeline: sizes {what} of micro-batches given; {count} positive numbers "
                f"that add up to {self.rows}, the rows of the batch, expected"
            )
        return given

    def edges(self) -> list[Mapping[Pair, Sequence[Edge]]]:
        """The compiled edges of each micro-batch. Collective."""
        of = {size: self._edges_for(size) for size in dict.fromkeys(self.sizes)}
        return [of[size] for size in self.sizes]

    def _edges_for(self, size: int) -> Mapping[Pair, Sequence[Edge]]:
        shape = size, *self.input.shape[1:]
        modes = tuple(call.modes for call in self._calls)
        key = shape, self.input.dtype, self._calls[0].autocast, modes
        known = self._tracing.edges.get(key)
        if known is not None:
            return known
        spaces = self._spaces(shape)
        edges = {}
        for a, b in self._plan.graph.crossing:
            slots = self._plan.slots[a, b], self._plan.slots.get((b, a), 0)
            moved = [spaces[a][k] for k in self._plan.graph.outputs[a, b]]
            edges[a, b] = [Edge(self._tracing.backend, X, self._plan.grid(b), slots) for X in moved]
        return self._tracing.edges.keep(key, edges)

    def _spaces(self, shape: Sequence[int]) -> dict[int, dict[int, Moved]]:
        """The stages' outputs for an input, found by running them on zeros: each worker its own,
        one after the other."""
        first = self.input.space
        bounds = {d: cuts for d, cuts in enumerate(first.bounds) if d and d in first.axes}
        blocks = TensorSpace(shape, first.partition, first.dtype, first.axes, bounds=bounds)
        of_input = Moved(blocks, self.input.dtype)
        spaces: dict[int, dict[int, Moved]] = {}
        graph = self._plan.graph
        for s in range(self._plan.stages):
            sources = [spaces[a][k] for a in graph.sources[s] for k in graph.outputs[a, s]]
            spaces[s] = self._outputs(s, sources or [of_input])
        return spaces

    def _outputs(self, s: int, sources: Sequence[Moved]) -> dict[int, Moved]:
        """A stage's outputs, by number."""
        tracing, doing = self._tracing, "trace linop.strategies.Pipeline"

        def probed() -> tuple[None, tuple[Meta, ...]]:
            if s not in self._stages:
                return None, ()
            try:
                with within(tracing.parts[s], tracing.backend):
                    found = self._probe(s, sources)
            except Exception as error:
                raise located(error, f"stage {s}, {inputs_named(sources)}") from error
            return None, call_metadata([*found.values()], False, ()).tensors

        _, metas = tracing.agreement.together(probed, "Pipeline", doing)
        numbers = self._plan.graph.taken(s) or [0]
        return {
            k: self._space(s, [one[at] if one else None for one in metas], sources)
            for at, k in enumerate(numbers)
        }

    def _probe(self, s: int, sources: Sequence[Moved]) -> dict[int, Tensor]:
        """Outputs of a stage of this worker for zeros. Collective over its workers."""
        inputs = [
            torch.zeros(
                X.on(self._plan.grid(s)).space.local_shape(self._plan.worker),
                dtype=X.dtype,
                device=self._arrays.device,
            )
            for X in sources
        ]
        meet = agreement_of(self._tracing.parts[s]).gather_objects
        return self._stages[s].probe(inputs, partial(meet, None, f"trace stage {s}"))

    def _space(self, s: int, metas: Sequence[Meta], sources: Sequence[Moved]) -> Moved:
        try:
            moved = self._moved(f"stage {s}", self._plan.grid(s), metas)
        except DTypeError as error:
            raise located(error, f"stage {s}: an output of its module") from None
        if s < self._plan.stages - 1 and moved.shape[0] != sources[0].shape[0]:
            raise ArgumentError(
                f"stage {s}: its module returns a tensor of shape {moved.shape} for "
                f"{inputs_named(sources)}; as many rows expected. Of tensors that do not depend on "
                f"the batch, such as masks or rotary embeddings, cut the model where it has none, "
                f"as before its head, or make them in each stage"
            )
        return moved

    def _moved(self, name: str, grid: Partition, metas: Sequence[Meta]) -> Moved:
        """The tensor of a stage's workers' blocks."""
        dtypes = dict.fromkeys(m[1] for m in metas if m is not None and len(m) > 1)
        if len(dtypes) == 1:  # else space_of refuses them
            kind = carrier(*dtypes)
            metas = [m if m is None or len(m) == 1 else (m[0], kind, *m[2:]) for m in metas]
        space = space_of(name, grid, metas, lambda _: range(grid.ndim), self._arrays)
        return Moved(space, *dtypes)


def located(error: Exception, where: str) -> LinopError:
    """An error with its place, which was told by another worker if the error was."""
    first = restated(error, str(error))
    found = restated(first, f"{where}: {first}")
    found.alarm = error.alarm if isinstance(error, LinopError) else None
    return found


def inputs_named(sources: Sequence[Moved]) -> str:
    """Inputs of a stage, in words."""
    return "input " + " and ".join(f"of shape {X.shape}" for X in sources)
