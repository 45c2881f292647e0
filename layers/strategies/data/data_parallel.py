"""Data parallel training: copies of a module, whose gradients are summed over the workers."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from linop.backends.autograd.real_calls import broken
from linop.errors import ArgumentError, expect
from linop.layers.agreement.input_agreement import agreement_of, program_backend
from linop.layers.parameters.marks import mark
from linop.operators.operator import LinearOperator
from linop.spaces.partition import Partition
from linop.spaces.region import integer
from linop.strategies.data.batch_norm import is_torchs, sync_batch_norm
from linop.strategies.data.batches import END, iterated, next_batch
from linop.strategies.data.bucket import MEBIBYTE, Flat
from linop.strategies.data.mean_losses import Hint, mean_checked, reduction_checked
from linop.strategies.data.operators import replication, summation
from linop.strategies.data.reducer import Reducer
from linop.strategies.data.replicas import (
    SERVER,
    Spread,
    agree,
    check_equal,
    described,
    module_checked,
    summed_already,
    to_write,
)
from linop.strategies.data.shapes_only import only_shapes
from linop.strategies.data.uneven import CHECK, FORWARD, SHARE, SUM, TOTAL, UnevenSteps, number_of
from linop.strategies.mesh import Axis

_NAME = "DataParallel"
_NO_GRAPH = (
    "linop: DataParallel sends buffers or parameters before its forward, outside of graphs: "
    "compile what is inside, DataParallel(torch.compile(net))"
)
_PREFIX = "module."
"""Of the names of the module's parameters in the wrapper."""


class DataParallel(torch.nn.Module):
    """Copies of a module on the workers of a mesh's axis, each with its part of the batch.
    Collective: all workers of the axis construct it, call it, and run backward, in the same order.

    The parameters are E θ, copies of one θ that moves nowhere; the gradients, in ``grad`` after
    backward, are E.H of the workers' own: an all-reduce, in buckets that start while backward runs.
    They are sums, of all terms that the workers' losses are of one loss, and nothing is divided
    unless asked for. A parameter that no worker used has the gradient None; one that some used, the
    sum of theirs. Gradients are discarded by setting them to None, as ``zero_grad`` does.

    Args:
        module: the same on all workers.
        axis: such as ``mesh["dp"]``; all workers of the current backend by default.
        algorithm: "all-reduce", or "ring": the same sum in steps around a ring.
        server: the parameters are worker `server`'s of the axis, B θ on the others: it alone gets
            gradients (others None), and its updates are broadcast before the next forward.
        reduction: "mean": gradients are divided by the number of workers, as by torch's
            DistributedDataParallel, whatever their batches' sizes; not with experts, whose
            gradients are sums that nobody divides; or "sum". By default it is the sum, too, with a
            warning, once, if the loss is a mean.
        broadcast_buffers: at each forward of training take the buffers of worker 0 (such as running
            means).
        init_sync: take parameters and buffers of worker 0 at construction; False: they are to be
            equal.
        bucket_cap_mb: mebibytes of a bucket.
        check_every: after so many sums of gradients `check` before the next forward; 0: never.

    Attributes:
        module: the given one. Its ``state_dict`` is that of the sequential model, and so is that of
            this module: the same keys, without ``module.``.

    Parameters whose ``requires_grad`` is turned on later, on all workers, are summed from the next
    forward on. Norms of ``torch.nn.SyncBatchNorm`` take their statistics over the workers
    (`sync_batch_norm`).

    After ``double()``, ``half()`` or ``to(dtype)``, on all workers, the next forward makes buckets
    of the new dtypes. A module without parameters is called as it is.

    Raises:
        ArgumentError: the module is none, or is parallel already; an argument is invalid.
            BackendError: modules or arguments differ between workers. On every worker.

    Example:
        Each worker computes with two of four rows, and has the gradient of all: here the sum of the
        rows, since the loss is the sum of the outputs.

        >>> x = torch.arange(8.0).view(4, 2)
        >>> def program(backend):
        ...     net = strategies.DataParallel(torch.nn.Linear(2, 1))
        ...     net(x.chunk(2)[backend.worker]).sum().backward()
        ...     return net.module.weight.grad.tolist()
        >>> linop.launch(program, workers=2)
        [[[12.0, 16.0]], [[12.0, 16.0]]]
    """

    _linop_wrapped = "module"

    def __init__(
        self,
        module: Any,
        axis: Axis | None = None,
        *,
        algorithm: str = "all-reduce",
        server: int | None = None,
        reduction: str | None = None,
        broadcast_buffers: bool = True,
        init_sync: bool = True,
        bucket_cap_mb: float = 25,
        check_every: int = 0,
    ) -> None:
        super().__init__()
        self.register_load_state_dict_pre_hook(_within)
        given = None if axis is None else expect("DataParallel: axis", axis, Axis)
        self.backend = program_backend() if given is None else given.backend
        self.workers = self.backend.workers or 1
        here = self.backend.worker or 0
        self.axis = axis or Axis("dp", tuple(range(self.workers)), here, self.backend)
        group = Partition((self.workers,))
        self._algorithm = algorithm

        def operator(size: int, dtype: Any) -> LinearOperator:
            total = summation(size, dtype, group, algorithm, server)
            return total / self.workers if reduction == "mean" else total

        def checked() -> tuple[dict[str, Tensor], Any]:
            reduction_checked(reduction)
            if not isinstance(bucket_cap_mb, int | float) or not bucket_cap_mb >= 0:
                raise ArgumentError(
                    f"bucket_cap_mb: mebibytes, from 0, expected, given {bucket_cap_mb!r}"
                )
            every_so = integer(check_every, "check_every")
            if every_so < 0 or (every_so and server is not None):
                raise ArgumentError(
                    f"check_every={every_so}: a number from 0 expected; with server= none, whose "
                    f"copies are equal after its broadcast"
                )
            self._apart = summed_already(module, self.axis)
            mean_checked(reduction, self._apart)
            parameters = module_checked(module, self.backend, self._apart)
            operator(1, torch.float64)
            sums = algorithm, server, reduction, bucket_cap_mb
            every = self._own(module), dict(module.named_buffers())
            options = *sums, broadcast_buffers, init_sync, check_every
            return parameters, (*map(described, every), options)

        parameters = agree(self.backend, _NAME, checked)
        self.module = module
        self._options: dict[str, Any] = {
            "algorithm": algorithm,
            "server": server,
            "reduction": reduction,
            "broadcast_buffers": broadcast_buffers,
            "bucket_cap_mb": bucket_cap_mb,
            "check_every": check_every,
        }
        if any(map(is_torchs, module.modules())):
            sync_batch_norm(module, self.axis)
        self._trained = [*parameters.values()]
        state = self._own(module) | dict(module.named_buffers())
        if init_sync:
            values = [*state.values()]
            Spread(values, self.backend, 0)(values)
        else:
            check_equal(state, self.backend, _NAME)
        self._reducer = Reducer(
            parameters, self.backend, operator, bucket_cap_mb * MEBIBYTE, server is not None
        )
        self._uneven = UnevenSteps(self.backend)
        self._reducer.beginning = partial(self._uneven.meet, SUM)
        self._broadcasts = server, broadcast_buffers
        self._mark(parameters.values())
        self._frozen = [(n, p) for n, p in self._own(module).items() if n not in parameters]
        every = (m._parameters for m in module.modules())
        self._places = [(held, name, p) for held in every for name, p in held.items()]
        self._spread = 0
        self._check_every, self._last_check = check_every, 0
        self._checked = False
        self._make_broadcasts()
        self._totals: dict[tuple[Any, int], Flat] = {}
        self._hint = None
        if reduction is None and self.workers > 1 and self.axis.index == 0:
            cure = "loss * net.share(len(rows)) for any"
            self._hint = Hint(_NAME, self.workers, cure, bool(self._apart))

    def _own(self, module: Any) -> dict[str, Tensor]:
        """The parameters that this axis has copies of: not those of experts that are cut over
        it."""
        return {n: p for n, p in module.named_parameters() if n not in self._apart}

    def _make_broadcasts(self) -> None:
        """Compile the broadcasts of parameters and buffers, of their dtypes. Collective."""
        server, of_buffers = self._broadcasts
        buffers = [*self.module.buffers()] if of_buffers else []
        self._dtypes = _dtypes(self._trained), _dtypes(buffers)
        self._server = None if server is None else Spread(self._trained, self.backend, server)
        self._of_buffers = Spread(buffers, self.backend, 0) if buffers else None
        if self._server is not None:
            self._reducer.failing = self._server.fail

    def __deepcopy__(self, memo: dict[int, Any]) -> DataParallel:
        """Another one, of a copy of the module. Collective."""
        copied = DataParallel(copy.deepcopy(self.module, memo), self.axis, **self._options)
        memo[id(self)] = copied
        own = vars(copied)
        kept = {k: v for k, v in vars(self).items() if "_hook" in k or k not in own}
        kept.pop("_compiled_call_impl", None)  # torch's modules have it copied by nobody
        own.update(copy.deepcopy(kept, memo))
        copied.training = self.training  # the module has its own, which stays
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """The module and the options. Loading is collective, and makes one over all workers."""
        del protocol
        if self.workers != (program_backend().workers or 1):
            raise ArgumentError(
                f"DataParallel over {self.axis.name!r} cannot be pickled: an axis of a mesh is a "
                f"running program's; pickle its module, and make another one of that"
            )
        return _unpickled, (self.module, self._options, self.training)

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        """The state of the module, with its keys: that of the sequential model."""
        return self.module.state_dict(*arguments, **options)

    def load_state_dict(self, state_dict: Any, *arguments: Any, **options: Any) -> Any:
        """Load the state of the module, as that does; the same on all workers. Keys may be those of
        ``named_parameters()``, with ``module.``."""
        if isinstance(state_dict, Mapping) and not hasattr(self.module, "module"):
            if all(str(key).startswith(_PREFIX) for key in state_dict):
                state_dict = {k.removeprefix(_PREFIX): v for k, v in state_dict.items()}
        return self.module.load_state_dict(state_dict, *arguments, **options)

    def forward(self, *arguments: Any, **options: Any) -> Any:
        """The module's output, on this worker's part of the batch."""
        sends = self._of_buffers is not None or self._server is not None or self._check_every
        sends = sends or self._uneven.open
        if torch.compiler.is_dynamo_compiling() and self.workers > 1 and sends:
            return broken(_NO_GRAPH, self._called, arguments, options)
        return self._called(arguments, options)

    def _called(self, arguments: Any, options: Any) -> Any:
        self._reducer.check_idle()
        # Other tensors than Parameters are those of a pipeline.
        if not self._checked or any(
            held.get(name) is not p and isinstance(held.get(name), torch.nn.Parameter)
            for held, name, p in self._places
        ):
            self._check_parameters()
        if any(p.requires_grad for _, p in self._frozen) and not only_shapes():
            self._thaw()
        self._before_forward()
        result = self.module(*arguments, **options)
        if self._hint is not None:
            self._hint.expect(result)
        return result

    def _thaw(self) -> None:
        """Sum the gradients of parameters that had none before, too. Collective.

        Raises:
            BackendError: workers have thawed different ones; on every worker.
        """
        thawed = {name: p for name, p in self._frozen if p.requires_grad}
        agree(
            self.backend,
            f"{_NAME}: parameters that have gradients from now on",
            lambda: (None, described(thawed)),
        )
        known = {*map(id, self._trained), *map(id, thawed.values())}
        every = {n: p for n, p in self.module.named_parameters() if id(p) in known}
        self._mark(thawed.values())
        self._frozen = [(name, p) for name, p in self._frozen if name not in thawed]
        self._trained = [*every.values()]
        self._reducer.have(every)
        self._make_broadcasts()

    def _mark(self, parameters: Iterable[Tensor]) -> None:
        strategy = "data parallel" if self._broadcasts[0] is None else SERVER
        for p in parameters:
            mark(p, strategy=strategy)

    def _before_forward(self) -> None:
        """Bring parameters and buffers to the state that a forward needs. Collective."""
        if only_shapes():
            return  # as a pipeline's stage finds shapes, each replica at calls of its own
        trains = self.training and self._reducer.enabled
        due = self._check_every and self._check_every <= self._reducer.reductions - self._last_check
        spread = self._server if self._spread < self._reducer.reductions else None
        if trains or due or spread is not None:
            self._uneven.meet(FORWARD)
        if trains and torch.is_grad_enabled():
            self._reducer.forwards += 1
        buffers = []
        if self._of_buffers is not None and trains:
            buffers = to_write(self.module)
        mine = _dtypes(self._trained), _dtypes(buffers) if buffers else self._dtypes[1]
        if mine != self._dtypes:  # double(), or the like, was called
            agree(self.backend, _NAME, lambda: (None, [*map(str, mine)]))
            self._reducer.rebuild()
            self._make_broadcasts()
        if due:
            self._last_check = self._reducer.reductions
            self._check_parameters()
            self._check_equal()
        if spread is not None:
            self._spread = self._reducer.reductions
            spread(self._trained)
        if self._of_buffers is not None and buffers:
            self._of_buffers(buffers)

    def joined(self, batches: Iterable[Any]) -> Iterator[Any]:
        """This worker's batches, then None as long as another worker has one: for None, call
        `without_batch` in the place of forward and backward. Collective: an all-reduce of 16 bytes
        for each.

        Raises:
            ArgumentError: the net has experts that are cut over workers (`ExpertParallel`).
            LinopError: the batches of a worker end in an error; on every worker.
        """
        self._check_all_are_called("joined")
        own = iterated(batches, self.backend, "DataParallel.joined")
        try:
            while (given := next_batch(own, self.backend, "DataParallel.joined"))[1]:
                batch, there = given
                self._uneven.begin(there, batch is not END)
                yield None if batch is END else batch
        finally:
            self._uneven.begin(0, False)

    def without_batch(self) -> None:
        """Take part in the calls of workers that have a batch, with no term of the loss: of this
        net, of `share`, and in the sum of gradients with which a backward ends. Collective.

        In a step of `joined` in any order; elsewhere once for a forward and a backward of the
        others, which ask for shares before: ``share(0)`` here.

        Raises:
            ArgumentError: the net has experts that are cut over workers (`ExpertParallel`).
            BackendError: the others do something else; on every worker.
        """
        self._check_all_are_called("without_batch")
        self._reducer.check_idle()
        if not (self._uneven.open and self._reducer.enabled):
            self._before_forward()
            if self._reducer.enabled:
                self._reducer.reduce()
            return
        with self._uneven.following() as calls:
            for call in calls:
                if call == SHARE:
                    self._share(0)
                else:
                    self._before_forward()
            self._reducer.reduce()

    def _check_all_are_called(self, name: str) -> None:
        if self._apart:
            raise ArgumentError(
                f"DataParallel.{name}: experts such as {min(self._apart)!r} take part in the calls "
                f"of all workers; where a worker has no batch, call the net with an empty batch"
            )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context of micro-batches whose gradients are kept, and summed over the workers with those
        of the first backward after it, or by `reduce_gradients`."""
        every = [self._reducer, *(one._reducer for one in self._inner)]
        before = [reducer.enabled for reducer in every]
        for reducer in every:
            reducer.enabled = False
        try:
            yield
        finally:
            for reducer, enabled in zip(every, before, strict=True):
                reducer.enabled = enabled

    def reduce_gradients(self) -> None:
        """Sum the gradients that have not been summed: after ``no_sync``, or where gradients are
        not backward's alone, as in a step of a `Pipeline` without optimizer. Collective."""
        for one in self._inner:
            one.reduce_gradients()
        self._reducer.reduce()

    @property
    def _inner(self) -> list[DataParallel]:
        """Reductions of experts, over other axes."""
        if not self._apart:
            return []
        return [one for one in self.module.modules() if isinstance(one, DataParallel)]

    def share(self, rows: Any) -> float:
        """This worker's part of all rows: a mean over its own, times this, is its term of the mean
        over the global batch. Collective.

        Args:
            rows: the number that this worker's mean was divided by: of rows, of targets that are
                not ignored, or a sum of weights of classes.

        A worker without a batch, of `joined`, gives 0, or leaves the call to `without_batch`.

        Raises:
            ArgumentError: a worker gives no number from 0, or all give 0; or gradients are
                divided already, by reduction="mean"; on every worker.
        """
        if self._uneven.without and self._reducer.enabled and number_of(rows) == 0:
            return 0.0  # its part in the sum is `without_batch`'s
        return self._share(rows)

    def _share(self, rows: Any) -> float:
        self._uneven.meet(SHARE, always=True)
        if self._options["reduction"] == "mean":
            raise ArgumentError(
                "DataParallel.share: gradients that are sums over the workers expected, and "
                "reduction='mean' divides them: leave the share out, or construct with "
                "reduction='sum'"
            )
        number, said = number_of(rows), repr(rows)
        given = number if 0 <= number < math.inf else math.nan
        if self._uneven.without and number:
            given, said = math.nan, f"{said} without a batch"
        total = float(self._total(torch.tensor(given, dtype=torch.float64)))
        if not total > 0:
            every = agreement_of(self.backend).gather_objects(said, SHARE)
            raise ArgumentError(
                f"DataParallel.share: numbers of rows, of which some are above 0, expected; given "
                f"{', '.join(every)}"
            )
        return number / total

    def total(self, value: Tensor) -> Tensor:
        """Sum over the workers, such as of losses, without gradient. Collective."""
        expect("DataParallel.total: value", value, torch.Tensor)
        self._uneven.meet(TOTAL)
        return self._total(value)

    def _total(self, value: Tensor) -> Tensor:
        key = value.dtype, value.numel()
        if key not in self._totals:
            E = replication(value.numel(), value.dtype, Partition((self.workers,)))
            self._totals[key] = Flat(E.H, self.backend, value.dtype)
        total = self._totals[key](value.detach().reshape(-1))
        assert total is not None
        return total.view(value.shape)

    def check(self) -> None:
        """Check that parameters are equal on all workers, and that the module has those that it had
        at construction, as the first forward does. Collective.

        Raises:
            BackendError: they are not; on every worker. ArgumentError: it has others.
        """
        self._uneven.meet(CHECK)
        self._check_parameters()
        self._check_equal()

    def _check_equal(self) -> None:
        check_equal(self._own(self.module), self.backend, _NAME)

    def _check_parameters(self) -> None:
        known = {*map(id, self._trained), *(id(p) for _, p in self._frozen)}
        # Other tensors than Parameters are those of torch.func.functional_call.
        others = [
            name
            for name, p in self._own(self.module).items()
            if id(p) not in known and isinstance(p, torch.nn.Parameter)
        ]
        if others:
            raise ArgumentError(
                f"DataParallel: parameters {others} are not those that it was constructed with, "
                f"and their gradients would not be summed; construct it after changes of the module"
            )
        self._checked = True


def _unpickled(module: Any, options: Mapping[str, Any], training: bool) -> DataParallel:
    made = DataParallel(module, **options)
    made.training = training
    return made


def _within(wrapper: Any, state: dict[str, Any], prefix: str, *unused: Any) -> None:
    """Before torch loads a model with the wrapper inside of it: name what is for its module so."""
    del wrapper, unused
    for key in [key for key in state if key.startswith(prefix)]:
        state[f"{prefix}{_PREFIX}{key.removeprefix(prefix)}"] = state.pop(key)


def _dtypes(tensors: Iterable[Tensor]) -> list[Any]:
    return [x.dtype for x in tensors]
