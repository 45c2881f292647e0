"""A pipeline's call, agreed upon by all workers: sizes of micro-batches, shapes of all stages, and
the compiled edges for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from operator import index
from typing import Any, NamedTuple

import torch

from linop.backends import Backend
from linop.errors import ArgumentError, BackendError, DTypeError, LinopError, restated
from linop.layers.agreement.input_agreement import Cache, InputAgreement, agreement_of
from linop.layers.agreement.metadata import Meta, metas_of, space_of
from linop.spaces.partition import Partition, balanced
from linop.spaces.tensor import TensorSpace
from linop.strategies.pipelines.batches import BatchDims, Given, dimensions, named
from linop.strategies.pipelines.construction import Plan
from linop.strategies.pipelines.execution import Pair
from linop.strategies.pipelines.forms import (
    Form,
    Layout,
    Leaf,
    Output,
    leaves,
    of_outputs,
    owners,
)
from linop.strategies.pipelines.lanes import Edge, Moved, carrier
from linop.strategies.pipelines.splitting import check_shapes
from linop.strategies.pipelines.stages.stage import Stage
from linop.strategies.pipelines.stages.stage_backends import within


class Call(NamedTuple):
    """One worker's call."""

    inputs: tuple[Meta, ...]
    """Metadata of the tensors of the input, and its form."""
    form: Form | None
    targets: tuple[Meta, ...]
    wrong: str
    """Reason why the input or the target cannot be taken; empty if they can."""
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
        given: Given,
        target: Given,
        trains: bool,
        device: str,
        stages: Iterable[Stage],
        sizes: Any,
        pipeline: int,
        broken: str,
    ) -> Call:
        """This worker's call, with torch's modes as they are.

        Args:
            given: arguments of the first stage, and the target; `NOTHING` on other workers.
            device: that of autocast.
            stages: of this worker.
            sizes: as the user gives them.
        """
        cast = str(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else ""
        modes = tuple([stage.modes for stage in stages])
        enabled = not trains or torch.is_grad_enabled()
        return cls(
            metas_of(given.tensors),
            given.form,
            metas_of(target.tensors),
            given.wrong or target.wrong,
            trains,
            cast,
            modes,
            enabled,
            None if sizes is None else _numbers(sizes),
            pipeline,
            broken,
        )


def _numbers(sizes: Any) -> tuple[int, ...] | str:
    """Sizes of micro-batches that a user gives, or, if they are no numbers, a description."""
    try:
        return tuple(map(index, sizes))
    except Exception:  # of whatever the user gives: all workers are to hear of it
        return repr(sizes)


class Sent(NamedTuple):
    """An output of a stage."""

    form: Form
    tensors: Sequence[Moved]


class Traced(NamedTuple):
    """All that is known of micro-batches of one size.

    Attributes:
        edges: compiled, between workers: one for each tensor that goes along them.
        leaves: tensors that go along each edge of the graph.
        layouts: by stage.
    """

    edges: Mapping[Pair, Sequence[Edge]]
    leaves: Mapping[Pair, Sequence[Leaf]]
    layouts: Mapping[int, Layout]


class Tracing:
    """State shared by calls of a pipeline: what is known of micro-batches, by size.

    Args:
        dims: dimensions of the batch, as the user gives them.
    """

    def __init__(
        self,
        plan: Plan,
        backend: Backend,
        parts: Mapping[int, Backend],
        agreement: InputAgreement,
        most: int,
        dims: BatchDims,
    ) -> None:
        self.plan = plan
        self.backend = backend
        self.parts = parts
        self.agreement = agreement
        self.dims = dims
        self.known = Cache[Traced](most)


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
        for worker, call in enumerate(calls):
            if call.wrong:
                raise ArgumentError(f"Pipeline: on worker {worker}: {call.wrong}")
        for what, each in (
            ("another pipeline", [call.pipeline for call in calls]),
            ("step on some, and evaluation", [call.trains for call in calls]),
            ("other autocast", [call.autocast for call in calls]),
            ("other sizes", [call.sizes for call in calls]),
            ("other inputs", self._forms()),
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
        self.inputs = self._inputs()
        first = calls[self._plan.grid(0).workers[0]]
        self.form, owner = first.form, owners(first.form, len(self.inputs))
        self.owners = owner
        self.rows, self.dims = dimensions(owner, [X.shape for X in self.inputs], tracing.dims)
        grid = self._plan.grid(0)
        for one, d in zip(owner, self.dims, strict=True):
            if d is not None and d < grid.ndim and grid.shape[d] > 1:
                raise ArgumentError(
                    f"batch_dims: {named(one)} is cut along dimension {d} by the workers "
                    f"{grid!r} of the first stage; another dimension of the batch expected"
                )
        self._check_targets()
        self.sizes = self._sizes(calls[0].sizes)

    @property
    def _arrays(self) -> Any:
        return self._tracing.backend.arrays

    @property
    def _takers(self) -> list[int]:
        """Workers of stages that take the input."""
        plan = self._plan
        firsts = [s for s in range(plan.stages) if not plan.graph.sources[s]]
        return list(dict.fromkeys(w for s in firsts for w in plan.grid(s).workers))

    def _forms(self) -> list[Form | None]:
        """The form of the input, by worker; that of the first one on workers without input."""
        first = self._plan.grid(0).workers[0]
        takers = self._takers
        return [self._calls[w if w in takers else first].form for w in range(len(self._calls))]

    def _inputs(self) -> list[Moved]:
        """The tensors of the input, of the first stage's workers' blocks."""
        grid = self._plan.grid(0)
        first = self._calls[grid.workers[0]].inputs
        metas = [self._calls[w].inputs if w in grid else () for w in range(len(self._calls))]
        for w in self._takers:
            theirs = self._calls[w].inputs
            # Of a stage on several workers each has a block of its own.
            same = [m and m[:2] for m in theirs] == [m and m[:2] for m in first]
            if len(theirs) != len(first) or not (w in grid or same):
                raise ArgumentError(
                    f"Pipeline: the input has other tensors on worker {w} than on worker "
                    f"{grid.workers[0]}; the same expected on workers of stages that take it"
                )
        return [
            self._moved("Pipeline", grid, [one[k] if one else None for one in metas])
            for k in range(len(first))
        ]

    def _check_targets(self) -> None:
        last = self._plan.grid(self._plan.stages - 1)
        for worker, meta in ((w, meta) for w in last.workers for meta in self._calls[w].targets):
            if meta is not None and (len(meta) == 1 or not meta[0] or meta[0][0] != self.rows):
                given = meta[0] if len(meta) == 1 else f"a tensor of shape {tuple(meta[0])}"
                cut = next(k for k, d in zip(self.owners, self.dims, strict=True) if d is not None)
                raise ArgumentError(
                    f"Pipeline: target on worker {worker}: {given} given; a tensor of {self.rows} "
                    f"rows expected, as the input has ({named(cut)}; batch_dims says which "
                    f"dimensions of inputs are the batch's)"
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

    def traced(self) -> list[Traced]:
        """All that is known of each micro-batch. Collective."""
        of = {size: self._traced(size) for size in dict.fromkeys(self.sizes)}
        return [of[size] for size in self.sizes]

    def _traced(self, size: int) -> Traced:
        blocks = [self._cut(X, d, size) for X, d in zip(self.inputs, self.dims, strict=True)]
        modes = tuple(call.modes for call in self._calls)
        shapes = tuple((X.shape, X.dtype) for X in blocks)
        key = shapes, self.form, self._calls[0].autocast, modes
        known = self._tracing.known.get(key)
        if known is not None:
            return known
        sent, layouts = self._outputs(blocks)
        graph = self._plan.graph
        moved = {
            (a, b): [X for k in graph.outputs[a, b] for X in sent[a][k].tensors]
            for a, b in graph.edges
        }
        edges = {}
        for a, b in graph.crossing:
            slots = self._plan.slots[a, b], self._plan.slots.get((b, a), 0)
            edges[a, b] = [
                Edge(self._tracing.backend, X, self._plan.grid(b), slots) for X in moved[a, b]
            ]
        sends = {
            (a, b): [(k, n) for k in outputs for n in range(len(sent[a][k].tensors))]
            for (a, b), outputs in graph.outputs.items()
        }
        return self._tracing.known.keep(key, Traced(edges, sends, layouts))

    def _cut(self, whole: Moved, d: int | None, size: int) -> Moved:
        """A micro-batch's part of a tensor of the input."""
        if d is None:
            return whole
        X = whole.space
        shape = *X.global_shape[:d], size, *X.global_shape[d + 1 :]
        bounds = {k: cuts for k, cuts in enumerate(X.bounds) if k != d and k in X.axes}
        return whole._replace(space=TensorSpace(shape, X.partition, X.dtype, X.axes, bounds=bounds))

    def _outputs(
        self, blocks: Sequence[Moved]
    ) -> tuple[dict[int, dict[Output, Sent]], dict[int, Layout]]:
        """The stages' outputs and layouts for an input, found by running them on zeros: each worker
        its own, one after the other."""
        every: dict[int, dict[Output, Sent]] = {}
        layouts = {}
        graph = self._plan.graph
        for s in range(self._plan.stages):
            taken = [(k, every[a][k]) for a in graph.sources[s] for k in graph.outputs[a, s]]
            form, sources = self.form, blocks
            if taken:
                form = of_outputs([(k, one.form) for k, one in taken])
                sources = [X for _, one in taken for X in one.tensors]
            every[s] = self._outputs_of(s, form, sources)
            layouts[s] = Layout(form, {k: one.form for k, one in every[s].items()})
        return every, layouts

    def _outputs_of(
        self, s: int, form: Form | None, sources: Sequence[Moved]
    ) -> dict[Output, Sent]:
        """A stage's outputs that others take."""
        tracing, doing = self._tracing, "trace linop.strategies.Pipeline"

        def probed() -> tuple[None, tuple[dict[Output, Form], tuple[Meta, ...]]]:
            if s not in self._stages:
                return None, ({}, ())
            try:
                if not self._plan.graph.sources[s]:
                    grid, worker = self._plan.grid(s), self._plan.worker
                    blocks = [X.on(grid).block(worker) for X in sources]
                    check_shapes(self._stages[s].module, blocks)
                with within(tracing.parts[s], tracing.backend):
                    forms, found = self._probe(s, form, sources)
            except Exception as error:
                raise located(error, f"stage {s}, {self._named(s, sources)}") from error
            return None, (dict(forms), metas_of([*found.values()]))

        _, everybodys = tracing.agreement.together(probed, "Pipeline", doing)
        grid = self._plan.grid(s)
        forms, metas = everybodys[grid.workers[0]]
        for worker in grid.workers:
            if everybodys[worker][0] != forms:
                raise BackendError(
                    f"stage {s}: its module returns values of one structure on worker "
                    f"{grid.workers[0]}, and of another one on worker {worker}"
                )
        spaces = [
            self._space(s, [one[1][n] if one[1] else None for one in everybodys])
            for n in range(len(metas))
        ]
        rest = iter(spaces)
        return {k: Sent(one, [next(rest) for _ in leaves(one)]) for k, one in forms.items()}

    def _probe(self, s: int, form: Form | None, sources: Sequence[Moved]) -> Any:
        """Outputs of a stage of this worker for zeros. Collective over its workers."""
        inputs = [
            torch.zeros(
                X.on(self._plan.grid(s)).block(self._plan.worker),
                dtype=X.dtype,
                device=self._arrays.device,
            )
            for X in sources
        ]
        meet = agreement_of(self._tracing.parts[s]).gather_objects
        return self._stages[s].probe(form, inputs, partial(meet, None, f"trace stage {s}"))

    def _named(self, s: int, sources: Sequence[Moved]) -> str:
        """Inputs of a stage, in words."""
        if self._plan.graph.sources[s] or len(sources) == 1:
            return "input " + " and ".join(f"of shape {X.shape}" for X in sources)
        said = []
        for owner, X, d in zip(self.owners, sources, self.dims, strict=True):
            how = "not cut" if d is None else f"cut along dimension {d}"
            said.append(f"{named(owner)} of shape {X.shape} ({how})")
        return f"{', '.join(said)}; batch_dims says which dimensions are the batch's"

    def _space(self, s: int, metas: Sequence[Meta]) -> Moved:
        try:
            return self._moved(f"stage {s}", self._plan.grid(s), metas)
        except DTypeError as error:
            raise located(error, f"stage {s}: an output of its module") from None

    def _moved(self, name: str, grid: Partition, metas: Sequence[Meta]) -> Moved:
        """The tensor of a stage's workers' blocks."""
        dtypes = dict.fromkeys(m[1] for m in metas if m is not None and len(m) > 1)
        if len(dtypes) == 1:  # else space_of refuses them
            kind = carrier(*dtypes)
            metas = [m if m is None or len(m) == 1 else (m[0], kind, *m[2:]) for m in metas]
        number = all(m is None or (len(m) > 1 and not m[0]) for m in metas)
        if number:
            metas = [m if m is None else (torch.Size((1,)), *m[1:]) for m in metas]
        space = space_of(name, grid, metas, lambda _: range(grid.ndim), self._arrays)
        return Moved(space, next(iter(dtypes)), number)


def located(error: Exception, where: str) -> LinopError:
    """An error with its place, which was told by another worker if the error was."""
    first = restated(error, str(error))
    found = restated(first, f"{where}: {first}")
    found.alarm = error.alarm if isinstance(error, LinopError) else None
    return found
