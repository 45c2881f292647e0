"""Sums of gradients over workers, in buckets, while backward runs.

The parameters of data parallel workers are copies E θ of one replicated θ. Their gradients on θ are
E.H of those on the copies: an all-reduce, which hooks of torch start for a bucket when all
gradients of it are there. Buckets start in one order on all workers.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from linop.backends import Backend
from linop.backends.autograd.dtypes import summed_dtype
from linop.errors import ArgumentError, BackendError
from linop.layers.parameters.blocks import plain
from linop.layers.parameters.marks import mark
from linop.operators.operator import LinearOperator
from linop.strategies.data.bucket import Flat, Layout, grouped
from linop.strategies.data.notes import SUMMED, Facts, Steps, add_up, different, summed_digest

_CURE = (
    "Call the module, run backward and update the parameters in the same order on every worker; "
    "of batches that some workers lack see DataParallel.joined"
)

_EARLY = (
    "DataParallel: an optimizer's step inside of backward, as in a hook after a gradient's "
    "accumulation, takes this worker's gradients: they are summed over the workers when backward "
    "ends; step then, or take fully_shard, whose gradients are sums in such hooks"
)


_UNSUMMED = (
    "DataParallel: an optimizer's step with gradients of no_sync() that have not been summed over "
    "the workers: each takes those of its own rows, and parameters differ between workers from now "
    "on. Leave no_sync() for the last micro-batch before a step, or call "
    "net.reduce_gradients() before it"
)


class UnsummedGradientsWarning(UserWarning):
    """Gradients that no sum over the workers has are stepped with."""


class _Bucket:
    """Parameters whose gradients are summed together: with a number for each that says how many
    workers have one. Those of half precision are summed in single precision.

    Args:
        noted: elements of a digest that follows these numbers.
    """

    def __init__(self, members: list[int], tensors: list[Tensor], noted: int) -> None:
        self.members = members
        self.dtype = tensors[0].dtype
        used = plain(tensors[0]).new_zeros(len(members) + noted, dtype=summed_dtype(self.dtype))
        self.layout = Layout([*tensors, used])
        self.flat = used.new_zeros(self.layout.size)
        *self.parts, self.used = self.layout.views(self.flat)
        self.flags = [0.0] * len(used)
        """Values of `used`."""
        self.left = len(members)
        self.flat_plan: Flat


@contextmanager
def _thawed(p: Tensor) -> Iterator[None]:
    """Context in which a parameter, which may be frozen, has a node and hooks."""
    before = p.requires_grad
    p.requires_grad_(True)
    try:
        yield
    finally:
        p.requires_grad_(before)


def _node(p: Tensor) -> Any:
    """The node that adds to a parameter's gradient; of one that is frozen, too."""
    with _thawed(p):
        return get_gradient_edge(p).node


def _after_accumulation(p: Tensor, hook: Callable[[Any], None]) -> Any:
    """The handle of a hook after a gradient was added to that of a parameter; of one that is
    frozen, too, which may be thawed again."""
    with _thawed(p):
        return p.register_post_accumulate_grad_hook(hook)


def _told_of_steps(reducer: Reducer) -> Callable[[], object]:
    """A function for `Steps`, which parameters hold, and so not the reducer."""
    known = weakref.WeakMethod(reducer.step_begins)

    def begins() -> None:
        if (method := known()) is not None:
            method()

    return begins


class ReducerOf(weakref.ref["Reducer"]):
    """A parameter's reducer, while that is there."""

    def __deepcopy__(self, memo: object) -> None:
        """A copied parameter has none."""


def reducer_of(parameter: Tensor) -> Reducer | None:
    """The reducer of a parameter of `DataParallel`; None of others."""
    known = getattr(parameter, "_linop_reducer", None)
    return None if known is None else known()


class Reducer:
    """Sums of parameters' gradients over the workers of a backend. Constructed by all of them.

    Gradients of a backward are summed and then added to ``grad``; with `enabled` False they are
    kept there, and summed with those of the next one.

    Args:
        parameters: by name; the same, in one order, on all workers.
        operator: of a number of elements and a dtype: from all workers' flat gradients to their
            sum.
        cap: bytes of a bucket.
        served: True if the sum is one worker's.

    Attributes:
        forwards: of training, since the last sum.
        beginning: called before the first message of a sum.
        failing: called when a sum fails.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        backend: Backend,
        operator: Callable[[int, Any], LinearOperator],
        cap: float,
        served: bool = False,
    ) -> None:
        self.enabled = True
        self.reductions = self.forwards = 0
        self.beginning: Callable[[], object] = lambda: None
        self.failing: Callable[[BaseException], object] = lambda error: None
        self._served = served
        self._seen: list[int] | None = None
        """Versions of the parameters at the last sum."""
        self._facts: Facts = {}
        """Of the last sum, and `_said` is their digest."""
        self._said: list[float] = []
        self._sum_of_digests: list[float] = []
        self._warned = False
        """A step of gradients that are not summed was warned of."""
        self._local: set[int] = set()
        """Parameters whose ``grad`` is this worker's alone."""
        self._before: dict[int, Tensor] = {}
        """Gradients that were summed earlier, set aside."""
        self._handles: list[Any] = []
        self._added_handles: list[Any] = []
        self._backend, self._operator, self._cap = backend, operator, cap
        self._begun: int | None = None
        """Number of buckets that have started; None outside of a backward."""
        self._parameters: list[Any] = []
        self.have(parameters)

    def have(self, parameters: Mapping[str, Tensor]) -> None:
        """Sum the gradients of these parameters from now on: of all that there were before, too,
        whose gradients stay. Collective."""
        before = self._parameters
        self._names = [*parameters][::-1]  # backward reaches the last ones first
        self._parameters = [parameters[name] for name in self._names]
        at = {id(p): k for k, p in enumerate(self._parameters)}
        moved = [at[id(p)] for p in before]
        self._local = {moved[k] for k in self._local}
        self._before = {moved[k]: grad for k, grad in self._before.items()}
        self._seen = None
        if (self._backend.workers or 1) > 1:
            self._steps = Steps(self._parameters, _EARLY, _told_of_steps(self))
        else:
            self._steps = Steps(self._parameters)
        for handle in self._added_handles:
            handle.remove()
        self._added_handles = [
            _after_accumulation(p, self._hook(Reducer._added, k))
            for k, p in enumerate(self._parameters)
        ]
        for p in self._parameters:
            mark(p, reducer=ReducerOf(self))
        self.rebuild()

    def _hook(self, method: Callable[[Reducer, int, Any], None], k: int) -> Callable[[Any], None]:
        """A hook of parameter `k`, or of its node, while this reducer is there. Python's collector
        does not see torch's references to tensors and nodes: through a hook that held the reducer,
        it would be kept with its model for ever."""
        known = weakref.ref(self)

        def hook(given: Any) -> None:
            if (reducer := known()) is not None:
                method(reducer, k, given)

        return hook

    def rebuild(self) -> None:
        """Make buckets of the parameters' dtypes, which have changed. Collective."""
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[int, _Bucket] = {}
        for members in grouped(self._parameters, self._cap):
            # The digest of what workers do alike rides with the first one.
            noted = 0 if self._buckets else SUMMED
            bucket = _Bucket(members, [self._parameters[k] for k in members], noted)
            op = self._operator(len(bucket.flat), bucket.flat.dtype)
            bucket.flat_plan = Flat(op, self._backend, bucket.flat.dtype)
            self._buckets.append(bucket)
            self._bucket_of |= dict.fromkeys(members, bucket)
        # torch makes another node for a parameter whose dtype has changed.
        self._nodes = [_node(p) for p in self._parameters]
        for handle in self._handles:
            handle.remove()
        self._handles = [
            node.register_prehook(self._hook(Reducer._set_aside, k))
            for k, node in enumerate(self._nodes)
        ]

    @property
    def unsummed(self) -> bool:
        """True if ``grad`` of some parameters is this worker's alone."""
        return any(self._parameters[k].grad is not None for k in self._local)

    def step_begins(self) -> None:
        """Before a step of an optimizer: warn once, on the first worker, if gradients of
        ``no_sync()`` have not been summed. It is no error, as torch's DistributedDataParallel has
        none: steps of each worker alone, as of local SGD, are like that."""
        if not self._warned and self.unsummed:
            self._warned = True
            if not self._backend.worker:
                warnings.warn(_UNSUMMED, UnsummedGradientsWarning, stacklevel=6)

    def aside(self, p: Tensor) -> Tensor | None:
        """The gradient of a parameter that was summed earlier, and is not in ``grad``."""
        return self._before.get(self._number(p))

    def keep(self, p: Tensor, summed: Tensor | None) -> None:
        """Take ``grad`` of a parameter for this worker's alone, to be summed, and then to be added
        to what was summed earlier."""
        k = self._number(p)
        self._local.add(k)
        if summed is not None:
            self._before[k] = summed

    def _number(self, p: Tensor) -> int:
        return next(k for k, one in enumerate(self._parameters) if one is p)

    def _set_aside(self, k: int, gradients: Any = None) -> None:
        """Before a gradient is added to ``grad``: from now on that is this worker's alone."""
        if gradients is not None and gradients[0] is None:
            return  # a shard that nobody used, whose node torch runs all the same
        p = self._parameters[k]
        if k in self._local:
            if p.grad is None:  # the user discarded what was there
                self._before.pop(k, None)
            return
        self._local.add(k)
        if p.grad is not None:
            self._before[k], p.grad = p.grad, None

    def _added(self, k: int, p: Tensor) -> None:
        """After a gradient was added to ``grad``."""
        try:
            self._check(k, p)
            if not self.enabled:
                return
            if self._begun is None:
                self.beginning()
                self._begun = 0
                for bucket in self._buckets:
                    bucket.left = len(bucket.members)
                torch.autograd.Variable._execution_engine.queue_callback(self.reduce)
            self._bucket_of[k].left -= 1
            # The last bucket is called when backward ends: nothing is left to overlap with.
            while self._begun < len(self._buckets) - 1 and not self._buckets[self._begun].left:
                self._fill(self._buckets[self._begun])
                self._buckets[self._begun].flat_plan.start(self._buckets[self._begun].flat)
                self._begun += 1
        except BaseException as error:
            self._fail(error)
            raise

    def _check(self, k: int, p: Tensor) -> None:
        grad = p.grad
        if grad is None:
            return
        if grad.layout is not torch.strided or grad.requires_grad:
            what = "create_graph=True" if grad.requires_grad else f"layout {grad.layout}"
            raise ArgumentError(
                f"gradient of {self._names[k]!r}: {what}; dense gradients without a graph expected"
            )
        if self._begun is not None and not self._bucket_of[k].left:
            raise ArgumentError(
                f"gradient of {self._names[k]!r}: computed twice in one backward; expected once: "
                f"use checkpoint(..., use_reentrant=False), or no_sync() and reduce_gradients()"
            )

    def check_idle(self) -> None:
        """Check that the last backward has ended well.

        Raises:
            BackendError: it has not; other workers' waits for this one are ended.
        """
        if self._begun is not None:
            error = BackendError("an earlier backward failed on this worker")
            self._fail(error)
            raise error

    def reduce(self) -> None:
        """Sum what has not been summed yet. Collective."""
        starts, begun, self._begun = self._begun is None, self._begun or 0, None
        try:
            if starts:
                self.beginning()
            for k, p in enumerate(self._parameters):
                self._find(k, p)
            for number, bucket in enumerate(self._buckets):
                if number >= begun:
                    self._fill(bucket)
                    if number < len(self._buckets) - 1:
                        bucket.flat_plan.start(bucket.flat)
            for bucket in self._buckets[:-1]:
                self._give(bucket, bucket.flat_plan.finish())
            for bucket in self._buckets[-1:]:
                self._give(bucket, bucket.flat_plan(bucket.flat))
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self._local.clear()
            self._before.clear()
        self.reductions += 1
        self._check_alike()

    def _check_alike(self) -> None:
        """Check that the sum was of gradients of the same calls.

        Raises:
            BackendError: a worker has not done what the others have; on every worker, or on the
                server of the parameters, which ends the others' waits.
        """
        said, self._sum_of_digests = self._sum_of_digests, []
        if add_up(said):
            return
        if self._served:
            error = BackendError(f"DataParallel: workers have not done the same. {_CURE}")
            self._fail(error)
            raise error
        raise different("DataParallel", self._facts, self._backend, _CURE)

    def _digest(self) -> list[float]:
        """Digest of what all workers do alike between two sums."""
        versions = [p._version for p in self._parameters]
        frozen = [
            name
            for name, p in zip(self._names, self._parameters, strict=True)
            if not p.requires_grad
        ]
        facts: Facts = {
            "forwards of training since gradients were summed last": self.forwards,
            "parameters without requires_grad": frozen,
        }
        if not self._served:  # the server's updates are copied to the others' parameters
            changed = self._seen not in (None, versions)
            facts |= self._steps.told("gradients were summed last")
            facts["parameters changed since gradients were summed last"] = changed
        self._seen, self.forwards = versions, 0
        if facts != self._facts:
            self._facts, self._said = facts, summed_digest(facts)
        return self._said

    def _find(self, k: int, p: Tensor) -> None:
        """Put a gradient that was summed earlier aside, if no backward has; count one that was set
        by other means as this worker's."""
        if k not in self._local and p.grad is not None:
            if getattr(p.grad, "_linop_is_summed", False):
                self._before[k] = p.grad
            else:
                self._local.add(k)

    def _fill(self, bucket: _Bucket) -> None:
        given, parts, flags = [], [], []
        for k, part in zip(bucket.members, bucket.parts, strict=True):
            own = self._parameters[k].grad if k in self._local else None
            flags.append(float(own is not None))
            if own is None:
                part.zero_()
            else:
                given.append(own)
                parts.append(part)
        if len(bucket.flags) > len(flags):
            flags += self._digest()
        if given:
            torch._foreach_copy_(parts, given)
        if flags != bucket.flags:
            bucket.flags = flags
            bucket.used.copy_(torch.tensor(flags))

    def _give(self, bucket: _Bucket, total: Tensor | None) -> None:
        """Set ``grad`` of a bucket's parameters; None where no worker has one."""
        if total is None:  # the sum is a server's
            for k in bucket.members:
                self._parameters[k].grad = None
            return
        *parts, used = bucket.layout.views(total)
        flags = used.tolist()
        if bucket.dtype != total.dtype:
            parts = [part.to(bucket.dtype) for part in parts]
        self._sum_of_digests += flags[len(bucket.members) :]
        for k, one, has in zip(bucket.members, parts, flags, strict=False):
            before = self._before.get(k)
            grad: Any = before if not has else one if before is None else before + one
            if grad is not None:
                grad._linop_is_summed = True
            self._parameters[k].grad = grad

    def _fail(self, error: BaseException) -> None:
        for bucket in self._buckets:
            bucket.flat_plan.fail(error)
        self.failing(error)
