"""Bridge from torch to bound plans: their calls with tensors, and the order of calls and of their
backward passes. `linop.backends.autograd.functions` adds it to torch's graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NoReturn, cast

import torch

from linop.backends import current
from linop.backends.autograd.dtypes import torch_dtype
from linop.backends.autograd.ports import Port
from linop.backends.device.device_arrays import DeviceArrays
from linop.backends.engine.arrays.arguments import Unfit, held
from linop.backends.engine.base import Backend, BoundPlan
from linop.errors import ArgumentError, LinopError
from linop.operators.operator import LinearOperator
from linop.operators.riesz import between_euclidean


class Order:
    """Order of the calls of a plan and of their backward passes, on this worker.

    Backward passes run in the same order on all workers; otherwise gradients of one pass would be
    added to those of another. Last-in-first-out needs no check, since every worker then agrees; any
    other order is compared collectively.
    """

    def __init__(self) -> None:
        self._calls = 0
        self.last = 0

    def opened(self) -> int:
        """Number of a new call."""
        self._calls += 1
        self.last = self._calls
        return self._calls


class Bridge:
    """A bound plan, called with tensors.

    Attributes:
        anchor: a leaf that is an input of every application, so that its result requires a gradient
            on every worker: backward runs on all of them or none, whichever tensors a worker has.
            Each bridge has its own: torch's anomaly mode holds the lock of a leaf's node while it
            waits for the interpreter, so that threads with a common leaf would deadlock.
        materializes: True: torch makes zeros of gradients that are None, before `filled`.
        takes_one: True if this worker holds one region of the domain.
        makes_many: True if it holds several of the codomain.
    """

    materializes = True

    def __init__(self, plan: BoundPlan, order: Order) -> None:
        plan.counters.forget()
        self.plan = plan
        self.dtype, made = (torch_dtype(s.dtype, plan.op) for s in (plan.domain, plan.codomain))
        self.order = order
        self._adjoint: Bridge | None = None
        self._started = False
        self.queue: Callable[[], AbstractContextManager[Any]] = nullcontext
        """Context of what `start` queues, such as a device's stream."""
        self._into, self._out_of = (
            [Port(plan.backend, region, dtype) for region in held(space, plan.backend.worker)]
            for space, dtype in ((plan.domain, self.dtype), (plan.codomain, made))
        )
        self._argument = self._into[0] if len(self._into) == 1 else None
        self._result = self._out_of[0] if len(self._out_of) == 1 else None
        self.takes_one, self.makes_many = self._argument is not None, len(self._out_of) > 1
        device = plan.backend.arrays.device
        self._nothing = torch.empty(0, dtype=self.dtype, device=device)
        self._nothing_made = torch.empty(0, dtype=made, device=device)
        with torch.inference_mode(False):
            self.anchor = torch.empty(0, device="cpu", requires_grad=True)

    @property
    def results(self) -> list[tuple[tuple[int, ...], Any]]:
        """Shape and dtype of each result of `run`."""
        found = [port.form for port in self._out_of]
        return found or [((0,), self._nothing_made.dtype)]

    @property
    def adjoint(self) -> Bridge:
        if self._adjoint is None:
            self._adjoint = type(self)(self.plan.H, self.order)
            self._adjoint._adjoint = self
        return self._adjoint

    @property
    def is_broken(self) -> bool:
        """True if an error has interrupted the plan here, or its adjoint's: calls raise."""
        adjoint = self._adjoint
        return self.plan.is_broken or (adjoint is not None and adjoint.plan.is_broken)

    def closing(self, call: int) -> None:
        """Before the backward pass of a call: check, collectively unless it is the last open one,
        that all workers run that one."""
        if call and (call != self.order.last or self.plan.backend.debug):
            self.plan.meet(call)
        if call:
            self.order.last = call - 1

    def token(self) -> Any:
        """A new tensor of no elements."""
        return torch.empty_like(self._nothing)

    def zeros(self) -> list[Any]:
        """A zero argument, as tensors."""
        return [port.zeros() for port in self._into] or [torch.zeros_like(self._nothing)]

    def zero(self, k: int) -> Any:
        """A zero tensor of one of the regions held here."""
        return self._into[k].zeros()

    def filled(self, gradients: Sequence[Any]) -> Sequence[Any]:
        """Gradients of the adjoint's results, as arguments."""
        return gradients

    def tensors(self, x: Any) -> list[Any]:
        """Tensors of a user's argument, in the order of the regions held here; a zero-volume tensor
        if there are none.

        Raises:
            Errors of the plan, on every worker, if the argument does not fit.
        """
        if not self._into and isinstance(x, torch.Tensor) and not x.numel():
            return [x]
        names = [port.name for port in self._into]
        if isinstance(x, Mapping):
            if any(name not in x for name in names) or any(n not in self.plan.domain for n in x):
                self._refuse(x)
            return [self._of_dtype(x[name]) for name in names] or [self._nothing]
        if len(names) == 1 and x is not None:
            return [self._of_dtype(x)]
        if names:
            self._refuse(x)
        if x is None:
            return [self._nothing]
        kind = f"a tensor of shape {tuple(x.shape)}" if hasattr(x, "shape") else repr(x)
        me = f"worker {self.plan.backend.worker}"
        words = f"{me} holds no region here; pass None or a zero-volume tensor, not {kind}"
        self._refuse(Unfit(ArgumentError(words)))

    def empty(self, tensors: Sequence[Any]) -> tuple[int, ...] | None:
        """Shape of the zero-volume argument, and so of its gradient, of a worker without a region
        in the domain; None elsewhere."""
        return None if self._into else tuple(tensors[0].shape)

    def _of_dtype(self, tensor: Any) -> Any:
        """The tensor, converted under autocast as torch's own functions and
        ``custom_fwd(cast_inputs=…)`` do."""
        if (
            isinstance(tensor, torch.Tensor)
            and tensor.dtype is not self.dtype
            and tensor.dtype is not torch.float64
            and tensor.is_floating_point()
            and self.dtype.is_floating_point
            and torch.is_autocast_enabled(tensor.device.type)
        ):
            return tensor.to(self.dtype)
        return tensor

    def _refuse(self, x: Any) -> NoReturn:
        """Call the plan with an invalid argument, so that it raises its error on every worker."""
        self.plan(x)
        raise AssertionError(f"{self.plan!r} took {x!r}")

    def start(self, tensors: Sequence[Any]) -> None:
        """Start what the next `run`, with the same tensors, or `finish` completes. The tensors must
        not change before. What an error has left is finished first."""
        if self._started:
            self.finish()
        with self.queue():
            self.plan.start(self._array(tensors))
        self._started = True

    @property
    def is_started(self) -> bool:
        """True between `start` and its end."""
        return self._started

    def finish(self) -> tuple[Any, ...]:
        """The results of what was started."""
        self._started = False
        return self._tensors(self.plan.finish())

    def run(self, tensors: Sequence[Any]) -> tuple[Any, ...]:
        """Call the plan with tensors, in the order of the regions held here."""
        if self._started:
            return self.finish()
        return self._tensors(self.plan(self._array(tensors)))

    def _array(self, tensors: Sequence[Any]) -> Any:
        try:
            if self._argument is not None:
                return self._argument.array(tensors[0])
            if not self._into:
                return None
            pairs = zip(self._into, tensors, strict=True)
            return {port.name: port.array(tensor) for port, tensor in pairs}
        except LinopError as error:
            return Unfit(error)

    def _tensors(self, y: Any) -> tuple[Any, ...]:
        if self._result is not None:
            return (self._result.tensor(y),)
        if y is None:
            return (torch.empty_like(self._nothing_made),)
        return tuple(p.tensor(a) for p, a in zip(self._out_of, y.values(), strict=True))

    def wrapped(self, tensors: Sequence[Any]) -> Any:
        """Result for the user: a tensor, or a dict by region name, from tensors in the order of the
        regions held here."""
        if not self.makes_many:
            return tensors[0]
        return {port.name: t for port, t in zip(self._out_of, tensors, strict=True)}


class DeviceBridge(Bridge):
    """Bridge for a plan on a device: its work is queued on torch's current stream, and that of
    `start` on another one if `queue` says so."""

    def __init__(self, plan: BoundPlan, order: Order) -> None:
        super().__init__(plan, order)
        self._arrays = cast(DeviceArrays, plan.backend.arrays)
        self._waits = any(p.kind is not self._arrays for p in (*self._into, *self._out_of))
        self.queue = partial(self._arrays.tensors.stream, torch)

    def finish(self) -> tuple[Any, ...]:
        with self._arrays.tensors.stream(torch):
            return super().finish()

    def run(self, tensors: Sequence[Any]) -> tuple[Any, ...]:
        if self._started:
            return self.finish()
        with self._arrays.tensors.stream(torch):
            results = super().run(tensors)
            if self._waits:
                # With tensors in host memory torch's graph does not order streams.
                self._arrays.streams.mark().synchronize()
            return results


def bridge_of(op: Any, backend: Backend | None) -> Bridge:
    """Bridge of an operator on a backend: compiled at the first call (a collective one), and kept
    with the operator.

    It is released with the operator, or when the backend's program has ended and the operator is
    compiled for another backend.

    Args:
        op: a `LinearOperator`, or a `BoundPlan`, which has its own backend.
    """
    here = current() if backend is None else backend
    try:
        known: Bridge = op.kept[here]
    except (AttributeError, KeyError):
        known = _new_bridge(op, here)
    return known


def _new_bridge(op: Any, backend: Backend) -> Bridge:
    if isinstance(op, BoundPlan):
        if op.backend not in op.kept:
            plain = between_euclidean(op.op)
            op.kept[op.backend] = _bridge(op if plain is op.op else op.backend.compile(plain))
        return op.kept[op.backend]  # type: ignore[no-any-return]
    if not isinstance(op, LinearOperator):
        raise ArgumentError(f"linop.autograd: a LinearOperator or a plan expected, given {op!r}")
    for space in (op.domain, op.codomain):
        torch_dtype(space.dtype, op)  # raises before anything is sent
    for other in [key for key in list(op.kept) if isinstance(key, Backend) and key.ended]:
        op.kept.pop(other, None)
    if (plain := between_euclidean(op)) is not op:  # torch's gradients are Euclidean
        op.kept[backend] = _new_bridge(plain, backend)
        return op.kept[backend]  # type: ignore[no-any-return]
    there = op.H.kept.get(backend)
    # Compiling is collective: its condition depends only on calls that all workers made.
    op.kept[backend] = there.adjoint if there else _bridge(backend.compile(op))
    return op.kept[backend]  # type: ignore[no-any-return]


def _bridge(plan: BoundPlan) -> Bridge:
    on_device = isinstance(plan.backend.arrays, DeviceArrays)
    return (DeviceBridge if on_device else Bridge)(plan, Order())
