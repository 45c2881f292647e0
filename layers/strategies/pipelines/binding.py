"""A pipeline's call, agreed upon by all workers: sizes of micro-batches, shapes of all stages, and
the compiled edges for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from linop.backends import Backend
from linop.backends.autograd.dtypes import torch_dtype
from linop.errors import ArgumentError, BackendError, DTypeError, LinopError, restated
from linop.layers.agreement.input_agreement import Cache, InputAgreement, agreement_of
from linop.layers.agreement.metadata import Meta, call_metadata, space_of
from linop.spaces.partition import Partition, balanced
from linop.spaces.tensor import TensorSpace
from linop.strategies.pipelines.construction import Plan
from linop.strategies.pipelines.execution import Pair
from linop.strategies.pipelines.lanes import Edge
from linop.strategies.pipelines.stage import Stage
from linop.strategies.pipelines.stage_backends import within

Tensor = Any
"""torch is not typed here."""


class Call(NamedTuple):
    """One worker's call."""

    tensors: tuple[Meta, ...]
    """Metadata of input and target."""
    trains: bool
    """True for a step."""
    autocast: str
    """Its dtype; empty if it is off."""
    sizes: tuple[int, ...] | str | None
    """Of micro-batches; text if they are none."""
    pipeline: int
    """Its number."""
    broken: str
    """The error of an earlier call, if there was one."""


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
        self._metas = [call.tensors[0] for call in calls]
        first = self._plan.grid(0)
        self.input = space_of(
            "Pipeline", first, self._metas, lambda _: range(first.ndim), self._arrays
        )
        self.rows = self.input.global_shape[0] if self.input.ndim else 0
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
        shape = size, *self.input.global_shape[1:]
        key = shape, self.input.dtype.name, self._calls[0].autocast
        known = self._tracing.edges.get(key)
        if known is not None:
            return known
        spaces = self._spaces(shape)
        edges = {}
        for a, b in self._plan.graph.crossing:
            slots = self._plan.slots[a, b], self._plan.slots[b, a]
            moved = [spaces[a][k] for k in self._plan.graph.outputs[a, b]]
            edges[a, b] = [
                Edge(self._tracing.backend, X, on_grid(X, self._plan.grid(b)), slots) for X in moved
            ]
        return self._tracing.edges.keep(key, edges)

    def _spaces(self, shape: Sequence[int]) -> dict[int, dict[int, TensorSpace]]:
        """Spaces of the stages' outputs for an input, found by running them on zeros: each worker
        its own, one after the other."""
        first = self.input
        bounds = {d: cuts for d, cuts in enumerate(first.bounds) if d and d in first.axes}
        of_input = TensorSpace(shape, first.partition, first.dtype, first.axes, bounds=bounds)
        spaces: dict[int, dict[int, TensorSpace]] = {}
        graph = self._plan.graph
        for s in range(self._plan.stages):
            sources = [spaces[a][k] for a in graph.sources[s] for k in graph.outputs[a, s]]
            spaces[s] = self._outputs(s, sources or [of_input])
        return spaces

    def _outputs(self, s: int, sources: Sequence[TensorSpace]) -> dict[int, TensorSpace]:
        """Spaces of a stage's outputs, by number."""
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

    def _probe(self, s: int, sources: Sequence[TensorSpace]) -> dict[int, Tensor]:
        """Outputs of a stage of this worker for zeros. Collective over its workers."""
        inputs = [
            torch.zeros(
                on_grid(X, self._plan.grid(s)).local_shape(self._plan.worker),
                dtype=torch_dtype(X.dtype),
                device=self._arrays.device,
            )
            for X in sources
        ]
        meet = agreement_of(self._tracing.parts[s]).gather_objects
        return self._stages[s].probe(inputs, partial(meet, None, f"trace stage {s}"))

    def _space(self, s: int, metas: Sequence[Meta], sources: Sequence[TensorSpace]) -> TensorSpace:
        grid = self._plan.grid(s)
        try:
            space = space_of(f"stage {s}", grid, metas, lambda _: range(grid.ndim), self._arrays)
        except DTypeError as error:
            raise located(error, f"stage {s}: an output of its module") from None
        kind = torch_dtype(space.dtype)
        ends = s == self._plan.stages - 1
        if not ends and not (kind.is_floating_point or kind.is_complex):
            raise ArgumentError(
                f"stage {s}: its module returns a tensor of {kind}; a dtype that has gradients "
                f"expected"
            )
        if not ends and space.global_shape[0] != sources[0].global_shape[0]:
            raise ArgumentError(
                f"stage {s}: its module returns a tensor of shape {space.global_shape} for "
                f"{inputs_named(sources)}; as many rows expected"
            )
        return space


def on_grid(X: TensorSpace, grid: Partition) -> TensorSpace:
    """The space of the same tensor in balanced blocks on another grid, or X itself on its own."""
    return X if X.partition == grid else TensorSpace(X.global_shape, grid, X.dtype)


def located(error: Exception, where: str) -> LinopError:
    """An error with its place, which was told by another worker if the error was."""
    first = restated(error, str(error))
    found = restated(first, f"{where}: {first}")
    found.alarm = error.alarm if isinstance(error, LinopError) else None
    return found


def inputs_named(sources: Sequence[TensorSpace]) -> str:
    """Inputs of a stage, in words."""
    return "input " + " and ".join(f"of shape {X.global_shape}" for X in sources)
