"""Pipelines: a model cut into stages on different workers, trained by a verified schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from linop.backends import Backend
from linop.errors import ArgumentError, BackendError
from linop.layers.agreement.input_agreement import Cache, agreement_of, program_backend
from linop.layers.parameters.generator import initial_seed
from linop.schedules import Schedule
from linop.spaces.partition import Partition
from linop.strategies.pipelines.batches import (
    NOTHING,
    BatchDims,
    Cut,
    Given,
    arguments_of,
    joined,
    target_of,
    targets_cut,
)
from linop.strategies.pipelines.binding import Call, Tracer, Tracing
from linop.strategies.pipelines.construction import (
    Plan,
    check_updates_last,
    norm_checked,
    optimizer_checked,
    options_checked,
    planned,
)
from linop.strategies.pipelines.execution import Actions, Resolver, Step, receives
from linop.strategies.pipelines.forms import Layout
from linop.strategies.pipelines.lanes import Lane
from linop.strategies.pipelines.means import Losses
from linop.strategies.pipelines.model.gradient_norm import GradientNorm
from linop.strategies.pipelines.model.stage_states import own
from linop.strategies.pipelines.model.stored import Stored
from linop.strategies.pipelines.model.tied_weights import TiedWeights, check_shared, in_several
from linop.strategies.pipelines.model.updates import Updates
from linop.strategies.pipelines.side_by_side import SideBySide
from linop.strategies.pipelines.splitting import keys_of_several
from linop.strategies.pipelines.stages.stage import Stage
from linop.strategies.pipelines.stages.stage_backends import (
    axes_across,
    fail,
    failure,
    made,
    parts_of,
)

Loss = Callable[[Any, Any], Tensor]
Optimizer = Callable[[list[Tensor]], Any]
Made = TypeVar("Made")
Item = TypeVar("Item")

_CACHE_SIZE = 32
"""Calls, and sizes of micro-batches, for which what was compiled is kept."""


class _Batch(NamedTuple):
    """All workers' call."""

    sizes: Sequence[int]
    dims: Sequence[int | None]
    """Of the input's tensors: those of the batch; None for one that is not cut."""
    layouts: Mapping[int, Mapping[int, Layout]]
    """By stage of this worker, and micro-batch."""
    lanes: Sequence[Lane]
    """Of all edges."""
    actions: Actions


class Pipeline(Stored):
    """Training of a chain of modules, or of any directed acyclic graph of them, over several
    workers. Collective: all workers of the backend construct it, and call its methods, in the same
    order.

    A step runs the actions of the schedule: every worker its own row, in order. Data go between
    stages by the operator `linop.repartition`, gradients back by its adjoint. For a schedule whose
    updates come last the gradients are, bit for bit, those of one process that adds the gradients
    of the same micro-batches in the order of each stage's backwards: None for parameters on which
    the loss does not depend. One limit: tensors between workers arrive contiguous, and torch may
    sum others in another order.

    Random numbers of a forward, as of dropout, depend on the seed of torch's generator on worker 0
    when the pipeline is constructed, on the stage, on the micro-batch and on the number of steps
    before: not on schedule or backend. A stage on several workers draws from torch's generator as
    it is, which threads share; there use `linop.layers.Dropout`.

    Args:
        stages: modules. The first is called with the input, each other one with what comes along
            the edges into it: tensors of any shape and dtype, in tuples, lists, dicts, named tuples
            and data classes such as transformers' outputs, beside None, numbers and text, which are
            constants. Those of other workers may be None. `linop.strategies.split` cuts a module. A
            function instead of a module makes it on the
            stage's workers alone: of their partition, in which they count from 0, for layers of
            linop.layers that are cut over them.
        schedule: of all workers and micro-batches; sends and receives may be left out, and so may
            updates, which then come last. Of forwards alone, the pipeline only evaluates.
        loss: ``loss(output, target)`` for the last stage's result for one micro-batch: a scalar.
        reduction: "sum": losses of micro-batches add up to that of the batch, with no division.
            "mean": `loss` is a mean; each micro-batch's is multiplied by its share of the rows of
            its update, or of what `count` gives, so that they add up to the mean over all.
        count: number that the mean of a micro-batch was divided by, or in proportion to it, as a
            function of its target: with ``reduction="mean"``, if that is not the number of rows.
            Cross entropies of torch and linop (or `functools.partial` of torch's functions) need
            none: targets that are ignored and weights of classes are counted. If another loss calls
            torch's with a mean over unequal parts of the rows, it is refused.
        optimizer: makes a torch optimizer of this worker's parameters, such as ``partial(
            torch.optim.SGD, lr=0.1)``; None: gradients stay in ``grad``, to which later steps add.
        workers: for each row of the schedule a worker of the backend, or a `Partition`: then all
            its workers hold the row's stages together, and axis k of it splits dimension k of
            tensors between stages, but not the first; by default row w is worker w.
        edges: pairs of stages (a, b): b takes the output of a, of several the first, and its
            gradient goes back, where those of all that take it are added. (a, b, k): b takes the
            k-th of several outputs of a, or, by a name k, that item of a dict or data class, as a
            keyword argument. (a, b, None): b takes all that a returns: items of a tuple or list by
            position, those of a dict or data class by name. By default the edges that `split`
            found, or (s, s + 1, None). A stage takes its inputs by ascending (a, k).
        recompute: True: compute forwards again in backward, and keep their inputs only.
        tied: groups of parameters that are one in the sequential model, by their keys in its
            state (`state_dict`): their gradients are added. Updates have to come last.
        max_norm: clip gradients by the norm of those of all stages before updates, which have to
            come last in the schedule.
        batch_dims: the batch's dimension of inputs, by their number, if they are given by position,
            or their name; None for what is the same for all micro-batches. By default the first
            dimension of tensors that have as many rows there as the first tensor of the input, and
            None for others, such as positions. Targets, and results that are joined, have the batch
            in their first dimension, whichever it is in inputs.
        slots: messages on their way along an edge, for which senders do not wait; by default so
            many that none ever waits.
        backend: by default the current one.

    Attributes:
        stages: this worker's modules, by index.
        optimizer: this worker's, or None; any learning-rate scheduler of torch may have it.
        losses: those of the last step's micro-batches, on the last stage's worker.

    Raises:
        ArgumentError, BackendError: stages, edges, workers and schedule do not fit together, or
            differ between workers; `optimizer` raises on one; an error of `linop.schedules.check`.
            On every worker.

    Example:
        Worker 0 has the first layer, and worker 1 the second; the gradients are one process's:

        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1)).double()
        >>> x, target = torch.ones(4, 2).double(), torch.zeros(4, 1).double()
        >>> squares = torch.nn.MSELoss(reduction="sum")
        >>> table = linop.schedules.one_forward_one_backward(stages=2, micro_batches=2)
        >>> def program(backend):
        ...     pipe = strategies.Pipeline(strategies.split(net, ["1"]), table, squares)
        ...     pipe.step(x, target)
        ...     return [p.grad.clone() for p in pipe.parameters()]
        >>> found = [grad for grads in linop.launch(program, workers=2) for grad in grads]
        >>> net.zero_grad(), squares(net(x), target).backward()
        (None, None)
        >>> [torch.allclose(p.grad, grad) for p, grad in zip(net.parameters(), found)]
        [True, True, True, True]
    """

    def __init__(
        self,
        stages: Sequence[Any],
        schedule: Schedule,
        loss: Loss | None = None,
        *,
        reduction: str = "sum",
        count: Callable[[Tensor], Any] | None = None,
        optimizer: Optimizer | None = None,
        workers: Sequence[int | Partition] | None = None,
        edges: Sequence[tuple[Any, ...]] | None = None,
        recompute: bool = False,
        tied: Sequence[Sequence[str]] = (),
        max_norm: float | None = None,
        batch_dims: BatchDims | None = None,
        slots: int | None = None,
        backend: Backend | None = None,
    ) -> None:
        with SideBySide.telling(stages):
            self._construct(
                stages,
                schedule,
                (loss, reduction, count, optimizer, recompute, max_norm, batch_dims),
                program_backend() if backend is None else backend,
                tied,
                workers=workers,
                edges=edges,
                slots=slots,
            )
        with self._across.agreed(f"reduction={reduction!r}, max_norm={max_norm}"):
            pass

    def _construct(
        self,
        stages: Sequence[Any],
        schedule: Schedule,
        options: tuple[Any, ...],
        backend: Backend,
        tied: Sequence[Sequence[str]],
        **placed: Any,
    ) -> None:
        """Construct all that this pipeline has. It raises on all its workers, or on none."""
        loss, reduction, count, optimizer, recompute, max_norm, batch_dims = options
        self.backend = backend
        self._agreement = agreement_of(self.backend)
        self._plan = self._planned(
            partial(planned, stages, schedule, backend, **placed),
            partial(options_checked, *options),
            stages,
            tied,
        )
        self._number = self._agreement.new_number()
        self._parts = parts_of(self._plan, self.backend)
        self._stages: dict[int, Stage] = {}
        self.stages: dict[int, Any] = {}
        self.optimizer: Any = None
        make = partial(self._make, stages, optimizer, recompute)
        _, said = self._together(make, "make stages and optimizer of")
        for stage in self._stages.values():
            stage.random.seed = said[0][0]
        # Parameters of modules that are called in several stages have one key in all of them.
        tied = [*tied, *in_several(tied, [keys for _, keys in said])]
        axes = map(axes_across, self.stages.values())
        self._across = SideBySide(self._agreement, self._plan.digest, axes)
        self._loss, self._ties = loss, tied
        self._losses: Losses | None = None
        if loss is not None and self._plan.is_last:
            part = self._parts[self._plan.stages - 1]
            self._losses = Losses(loss, reduction, count, self._plan.groups, part)
        self.losses: list[Tensor] = []
        self._batches = Cache[_Batch](_CACHE_SIZE)
        self._tracing = Tracing(
            self._plan,
            self.backend,
            self._parts,
            self._agreement,
            _CACHE_SIZE,
            dict(batch_dims or {}),
        )
        self._broken = ""
        self._norm: GradientNorm | None = None
        self._tied: TiedWeights | None = None
        if tied:
            check_updates_last(self._plan, "tied")
            self._tied = TiedWeights(tied, self._plan, self.backend, self._agreement, self._own)
        if max_norm is not None:
            check_updates_last(self._plan, "max_norm")
            self._norm = self._gradient_norm()
        self._updates = Updates(self._stages, self._tied, self._norm, max_norm)

    def _gradient_norm(self) -> GradientNorm:
        copies = () if self._tied is None else self._tied.copies
        return GradientNorm(
            self._plan, self.backend, self._agreement, self._stages, self._parts, copies
        )

    def _planned(
        self,
        plan: Callable[[], Plan],
        options: Callable[[], tuple[Any, ...]],
        stages: Sequence[Any],
        tied: Sequence[Sequence[str]],
    ) -> Plan:
        """The plan of the pipeline, as all workers agree."""

        def checked() -> tuple[Plan, Any]:
            mine = plan()
            check_shared(mine, stages, tied)
            return mine, (mine.digest, *options(), str(tied))

        mine, everybodys = self._together(checked, "construct")
        for worker, theirs in enumerate(everybodys):
            if theirs != everybodys[0]:
                raise BackendError(
                    f"Pipeline: worker {worker} has another schedule, edges or options than worker "
                    f"0; the same expected on every worker"
                )
        return mine

    def _together(
        self, make: Callable[[], tuple[Made, Item]], doing: str
    ) -> tuple[Made, list[Item]]:
        return self._agreement.together(make, "Pipeline", f"{doing} linop.strategies.Pipeline")

    def _fail(self, error: BaseException) -> None:
        fail(self._parts.values(), self.backend, error)

    def _make(
        self, stages: Sequence[Any], optimizer: Optimizer | None, recompute: bool
    ) -> tuple[None, tuple[int, list[str]]]:
        """Make this worker's stages and its optimizer; torch's seed, and keys of parameters that
        other stages have, too."""
        try:
            return self._made(stages, optimizer, recompute)
        except BaseException as error:
            self._fail(error)
            raise

    def _made(
        self, stages: Sequence[Any], optimizer: Optimizer | None, recompute: bool
    ) -> tuple[None, tuple[int, list[str]]]:
        plan = self._plan
        self.stages = {s: made(s, stages[s], plan.grid(s), self._parts[s]) for s in plan.mine}
        self._own = own(self.backend, self.stages, self._parts)
        self._stages = {
            s: Stage(
                s,
                self.stages[s],
                plan.row,
                plan.graph.taken(s),
                recompute,
                halves=plan.grid(s).size == 1 and not axes_across(self.stages[s]),
                count=self._counting(s) if plan.shares_backwards(s) else None,
            )
            for s in plan.mine
        }
        if optimizer is not None:
            self.optimizer = optimizer_checked(optimizer(self._parameters()))
        common = [key for s in plan.mine for key in keys_of_several(self.stages[s])]
        return None, (initial_seed(), common)

    def _counting(self, stage: int) -> Callable[[bool], int]:
        doing = f"count the workers of stage {stage} that have a gradient"
        return partial(agreement_of(self._parts[stage]).sum, doing=doing)

    def _parameters(self) -> list[Tensor]:
        found = list(dict.fromkeys(self.parameters()))  # stages may share some
        # torch's optimizers take no empty list, and their schedulers are to work everywhere.
        return found or [torch.nn.Parameter(torch.empty(0))]

    # Interface for users

    def step(
        self, x: Any = None, target: Any = None, sizes: Sequence[int] | None = None, **inputs: Any
    ) -> Tensor | None:
        """One run of the schedule: gradients, and the updates. Collective.

        Args:
            x: the whole batch, on the worker of the first stage (of several, each its block);
                ignored on others. Several inputs by position are a tuple, several by name a dict,
                such as ``{"input_ids": words, "attention_mask": mask}``.
            target: the whole batch's, on the last stage's workers, or None; ignored on others. A
                tensor, or a tuple, dict or data class of tensors with as many rows.
            sizes: rows of each micro-batch, on all workers; balanced by default.
            **inputs: others of the first stage, by name; see `batch_dims`.

        Returns:
            The loss of the batch, a scalar, on the last stage's worker; of a schedule with several
            updates one for each. None on others. Several workers of a last stage have what `loss`
            is of their blocks, each its own: the loss of the batch is the sum of these, or each of
            them if `loss` is a layer of linop.layers, which is the whole one on each.

        Raises:
            ArgumentError: the batch cannot be split; a tensor or a module does not fit, or a module
                raised; gradients are disabled. On every worker, before a message of the step.
            BackendError: an earlier step failed.
        """
        if self._loss is None:
            raise ArgumentError("Pipeline: it has no loss, which step needs")
        if not self._plan.groups:
            raise ArgumentError(
                "Pipeline: its schedule has forwards alone, and step needs backwards; call the "
                "pipeline, as pipe(x), to evaluate"
            )
        given, wanted = self._given(x, inputs), target_of(target) if self._plan.is_last else NOTHING
        batch = self._agreed(True, given, wanted, sizes)
        targets = targets_cut(wanted, batch.sizes) if self._plan.is_last else []
        step = self._run(batch, given, targets)
        self.losses = [value for _, value in sorted(step.losses.items())]
        if not self._plan.is_last:
            return None
        sums: list[Any] = [sum(step.losses[m] for m in group) for group in self._plan.groups]
        total: Tensor = sums[0] if len(sums) == 1 else torch.stack(sums)
        return total

    def __call__(self, x: Any = None, sizes: Sequence[int] | None = None, **inputs: Any) -> Any:
        """The model's output, without gradients. Collective; see `step`. A batch may have fewer
        rows than the schedule has micro-batches.

        Returns:
            The output for the whole batch on the last stage's workers; None on others: those of
            micro-batches, joined along their first dimension. Of several tensors a tuple or dict;
            of numbers one for each micro-batch, in a vector; what is no tensor is the same for all.

        Raises:
            LinopError: as `step`. ArgumentError: on the last stage's workers, a tensor has neither
                the rows of its micro-batch, nor is the same for all; or another value differs
                between micro-batches.
        """
        with torch.inference_mode(False):  # what is compiled here serves steps, too
            given = self._given(x, inputs)
            batch = self._agreed(False, given, NOTHING, sizes)
            step = self._run(batch, given)
            if not self._plan.is_last:
                return None
            return joined([y for _, y in sorted(step.outputs.items())], batch.sizes)

    def clip_grad_norm_(self, max_norm: float) -> Tensor | None:
        """Clip the gradients of all stages by their norm, as `torch.nn.utils.clip_grad_norm_` does
        those of the whole model; return the norm. Collective.

        Raises:
            ArgumentError: `max_norm` is no number from 0. BackendError: it differs between workers.
                On every worker.
        """
        with self._across.agreed(f"clip_grad_norm_({max_norm})"):
            _, said = self._together(lambda: (None, norm_checked(max_norm)), "clip gradients of")
            if set(said) != {said[0]}:
                raise BackendError(f"Pipeline: max_norm {said} given by the workers; one expected")
        self._norm = self._norm or self._gradient_norm()
        return self._norm.clip(max_norm) if self._plan.mine else None

    # Steps

    def _given(self, x: Any, inputs: Mapping[str, Any]) -> Given:
        return arguments_of(x, inputs) if self._plan.is_first else NOTHING

    def _agreed(
        self, trains: bool, given: Given, target: Given, sizes: Sequence[int] | None
    ) -> _Batch:
        plan = self._plan
        broken = self._broken or failure(self._parts.values())
        device = self.backend.arrays.device
        mine = Call.of(
            given, target, trains, device, self._stages.values(), sizes, self._number, broken
        )
        total = self._agreement.total(self._number, mine)  # type: ignore[arg-type]
        known = self._batches.get(total)
        doing = "a step" if trains else "an evaluation"
        if known is not None:
            if self._across.any:
                with self._across.agreed(doing, lambda: known.sizes):
                    pass
            return known
        everybodys = self._agreement.gather_objects(mine, "call linop.strategies.Pipeline")
        with self._across.agreed(doing, lambda: tracer.sizes):
            tracer = Tracer(everybodys, self._tracing, self._stages)
            traced = tracer.traced() if self._across.traces_alone else None
        if traced is None:
            traced = tracer.traced()
        table = plan.table if trains else plan.forwards(len(tracer.sizes))
        layouts = {s: {m: one.layouts[s] for m, one in enumerate(traced)} for s in self._stages}
        edges, leaves = [one.edges for one in traced], [one.leaves for one in traced]
        orders = receives(table, edges)
        resolver = Resolver(plan.graph, self._stages, edges, leaves, orders, trains)
        actions = resolver.actions(plan.row_of(table))
        lanes = [lane for lane, _ in orders.values()]
        batch = _Batch(tracer.sizes, tracer.dims, layouts, lanes, actions)
        return self._batches.keep(total, batch)

    def _run(self, batch: _Batch, given: Given, targets: Sequence[Any] | None = None) -> Step:
        """Run the schedule; to train, with the targets of micro-batches, on workers that have
        some."""
        trains = targets is not None
        try:
            if targets is not None and self._losses is not None:
                self._losses.begin(batch.sizes, targets)
            for s, stage in self._stages.items():
                stage.random.begin()
                stage.layouts = batch.layouts[s]
                if trains:
                    stage.begin()
            if trains:
                self._updates.begin(self.optimizer)
            dims = batch.dims if self._plan.is_first else ()
            inputs = Cut(given.tensors, dims, batch.sizes)
            step = Step(inputs, self._losses if trains else None, self._updates.update)
            with nullcontext() if trains else torch.no_grad():  # steps have gradients enabled
                step.run(batch.actions)
        except BaseException as error:
            self._broken = f"{type(error).__name__}: {error}"
            self._fail(error)
            for lane in batch.lanes:
                lane.fail(error)
            for collective in (self._tied, self._norm, *self._stages.values()):
                if collective is not None:
                    collective.fail(error)
            raise
        return step
