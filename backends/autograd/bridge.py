"""Bridge from torch to bound plans: zero-copy conversion of tensors, order of calls and their
backward passes, and recorded results for checkpointing. `linop.backends.autograd.functions` adds it
to torch's graph."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from linop.backends import current
from linop.backends.base import Backend, BoundPlan, Unfit, held
from linop.backends.device.device_arrays import DeviceArrays
from linop.errors import ArgumentError, BackendError, DTypeError, LinopError, MissingExtraError
from linop.operators.operator import LinearOperator
from linop.spaces.scalars import Array

try:
    import torch
except ImportError as error:
    raise MissingExtraError(
        f"linop.autograd needs torch: pip install 'linop-algebra[torch]' ({error})"
    ) from None

_SAME = ("float64", "float32", "float16", "complex128", "complex64")
_WHOLE = ("int64", "int32", "int16", "int8", "uint8")
_DTYPES = {name: getattr(torch, name) for name in (*_SAME, *_WHOLE, "bfloat16")}
"""torch's dtypes, by NumPy's names."""


def numpy_dtype(dtype: Any) -> np.dtype[Any]:
    """Operator dtype for tensors of a torch dtype.

    Raises:
        DTypeError: there is none. MissingExtraError: bfloat16 needs ml_dtypes, which is not
            installed.
    """
    names = {known: name for name, known in _DTYPES.items()}
    if dtype not in names:
        raise DTypeError(f"tensors of {dtype} given; operators are on {', '.join(_DTYPES)}")
    if dtype is torch.bfloat16:
        try:
            import ml_dtypes
        except ImportError as error:
            raise MissingExtraError(
                f"bfloat16 needs ml_dtypes: pip install 'linop-algebra[torch]' ({error})"
            ) from None
        name: Any = ml_dtypes.bfloat16
    else:
        name = names[dtype]
    found: np.dtype[Any] = np.dtype(name)
    return found


def torch_dtype(dtype: np.dtype[Any]) -> Any:
    """torch dtype of the tensors that an operator of a dtype takes."""
    return _DTYPES[dtype.name]


def is_of(x: Any, dtype: Any) -> bool:
    """True if `x` is a tensor of a torch dtype."""
    return isinstance(x, torch.Tensor) and x.dtype is dtype


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
        """Number of a new call; 0 during a replay."""
        if _LOCAL.replays:
            return 0  # the replayed call has a number
        self._calls += 1
        self.last = self._calls
        return self._calls


def _of_bits(array: Array) -> Any:
    """Tensor that shares memory with a bfloat16 array, which ``torch.from_numpy`` does not
    accept."""
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)


class Bridge:
    """A bound plan, called with tensors.

    Attributes:
        anchor: a leaf that is an input of every application, so that its result requires a gradient
            on every worker: backward runs on all of them or none, whichever tensors a worker has.
            Each bridge has its own: torch's anomaly mode holds the lock of a leaf's node while it
            waits for the interpreter, so that threads with a common leaf would deadlock.
    """

    def __init__(self, plan: BoundPlan, dtype: Any, order: Order) -> None:
        plan.counters.forget()
        self.plan = plan
        self.dtype = dtype
        self.order = order
        self._adjoint: Bridge | None = None
        self._into = held(plan.domain, plan.backend.worker)
        self._out_of = held(plan.codomain, plan.backend.worker)
        self.one = len(self._into) == len(self._out_of) == 1
        self._tensor = _of_bits if dtype is torch.bfloat16 else torch.from_numpy
        self._debug = plan.backend.debug
        arrays = plan.backend.arrays
        self._kinds = [arrays.of(region.memory) for region in self._into]
        self._nothing = torch.empty(0, dtype=dtype, device=arrays.device)
        with torch.inference_mode(False):
            self.anchor = torch.empty(0, device="cpu", requires_grad=True)

    @property
    def adjoint(self) -> Bridge:
        if self._adjoint is None:
            self._adjoint = type(self)(self.plan.H, self.dtype, self.order)
            self._adjoint._adjoint = self
        return self._adjoint

    def closing(self, call: int) -> None:
        """Before the backward pass of a call: check, collectively unless it is the last open one,
        that all workers run that one."""
        if call and (call != self.order.last or self._debug):
            self.plan.meet(call)
        if call:
            self.order.last = call - 1

    def zeros(self) -> list[Any]:
        """A zero argument, as tensors."""
        pairs = zip(self._into, self._kinds, strict=True)
        made = [torch.zeros(r.shape, dtype=self.dtype, device=kind.device) for r, kind in pairs]
        return made or [torch.zeros_like(self._nothing)]

    def tensors(self, x: Any) -> list[Any]:
        """Tensors of a user's argument, in the order of the regions held here; a zero-volume tensor
        if there are none.

        Raises:
            Errors of the plan, on every worker, if the argument does not fit.
        """
        names = [region.name for region in self._into]
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
        if not isinstance(x, torch.Tensor) or x.numel():
            kind = f"a tensor of shape {tuple(x.shape)}" if hasattr(x, "shape") else repr(x)
            me = f"worker {self.plan.backend.worker}"
            words = f"{me} holds no region here; pass None or a zero-volume tensor, not {kind}"
            self._refuse(Unfit(ArgumentError(words)))
        return [x.reshape(0)]

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

    def _refuse(self, x: Any) -> None:
        """Call the plan with an invalid argument, so that it raises its error on every worker."""
        self.plan(x)
        raise AssertionError(f"{self.plan!r} took {x!r}")

    def run(self, tensors: Sequence[Any]) -> tuple[Any, ...]:
        """Call the plan with tensors, in the order of the regions held here."""
        if self.one:
            try:
                x: Any = self._array(0, tensors[0])
            except LinopError as error:
                x = Unfit(error)
            return (self._tensor(self.plan(x)),)
        try:
            arrays = {r.name: self._array(k, tensors[k]) for k, r in enumerate(self._into)}
            x = arrays or None
        except LinopError as error:
            x = Unfit(error)
        y = self.plan(x)
        if y is None:
            return (torch.empty_like(self._nothing),)
        return tuple(map(self._tensor, y.values() if isinstance(y, dict) else [y]))

    def _array(self, number: int, tensor: Any) -> Array:
        """Array that shares memory with a tensor; the plan checks its shape."""
        if is_of(tensor, self.dtype):
            try:
                array: Array = tensor.numpy()
                return array
            except (RuntimeError, TypeError):
                pass  # not a plain tensor: the checks below cost plain ones nothing
        self._check(number, tensor)
        try:
            if self.dtype is torch.bfloat16:  # NumPy's bfloat16 is that of ml_dtypes
                bits: Array = tensor.detach().view(torch.int16).numpy(force=True)
                return bits.view(self.plan.op.dtype)
            array = tensor.numpy(force=True)  # resolves conj and neg views, which are lazy
        except (RuntimeError, TypeError) as error:
            raise self._unread(number, error) from None
        return array

    def _check(self, number: int, tensor: Any) -> None:
        """Check type, dtype, layout and device of a tensor.

        Raises:
            ArgumentError, DTypeError: they are not those expected.
        """
        if not isinstance(tensor, torch.Tensor):
            raise self._unfit(number, f"{type(tensor).__name__} given, torch.Tensor expected")
        if tensor.dtype is not self.dtype:
            where = self._into[number].name
            raise DTypeError(
                f"tensor of region {where!r}: dtype {tensor.dtype} given, {self.dtype} expected; "
                f"convert it with .to({self.dtype})"
            )
        if tensor.layout is not torch.strided:
            words = (
                f"layout {tensor.layout} given, torch.strided expected; convert it with .to_dense()"
            )
            raise self._unfit(number, words)
        kind = self._kinds[number]
        if tensor.device.type != kind.device:
            words = f"on device {tensor.device}, while plans of {self.plan.backend.name!r} "
            memory = self._into[number].memory
            words += "work" if memory == "default" else f"have regions of {memory!r} memory"
            raise self._unfit(
                number, f"{words} in {kind.memory}; move it with .to({kind.device!r})"
            )

    def _unread(self, number: int, error: Exception) -> ArgumentError:
        return self._unfit(number, f"it has no memory that could be read: {error}")

    def _unfit(self, number: int, words: str) -> ArgumentError:
        return ArgumentError(f"tensor of region {self._into[number].name!r}: {words}")

    def wrapped(self, tensors: Sequence[Any]) -> Any:
        """Result for the user: a tensor, or a dict by region name, from tensors in the order of the
        regions held here."""
        if len(self._out_of) < 2:
            return tensors[0]
        return {r.name: t for r, t in zip(self._out_of, tensors, strict=True)}


class DeviceBridge(Bridge):
    """Bridge for device arrays: they share memory with tensors by DLPack, and a plan's work is
    queued on torch's current stream."""

    def __init__(self, plan: BoundPlan, dtype: Any, order: Order) -> None:
        super().__init__(plan, dtype, order)
        self._arrays = cast(DeviceArrays, plan.backend.arrays)
        self._in_main_memory = self._tensor
        self._tensor = self._of_array
        into, out_of = ({r.memory == "host" for r in s} for s in (self._into, self._out_of))
        self._waits = True in into | out_of

    def run(self, tensors: Sequence[Any]) -> tuple[Any, ...]:
        with self._arrays.stream_of(torch):
            results = super().run(tensors)
            if self._waits:
                # With tensors in host memory torch's graph does not order streams.
                self._arrays.mark().synchronize()
            return results

    def _array(self, number: int, tensor: Any) -> Array:
        if self._kinds[number] is not self._arrays:
            return super()._array(number, tensor)
        self._check(number, tensor)
        try:
            plain = tensor.detach().resolve_conj().resolve_neg()
            if self.dtype is torch.bfloat16:  # the array module's bfloat16 is that of ml_dtypes
                return self._arrays.of_tensor(plain.view(torch.int16)).view(self.plan.op.dtype)
            return self._arrays.of_tensor(plain)
        except (RuntimeError, TypeError, BufferError) as error:
            raise self._unread(number, error) from None

    def _of_array(self, array: Array) -> Any:
        if isinstance(array, np.ndarray):
            return self._in_main_memory(array)
        if self.dtype is torch.bfloat16:
            bits = self._arrays.to_tensor(torch, array.view(np.int16))
            return bits.view(torch.bfloat16)
        return self._arrays.to_tensor(torch, array)


def _bridge(plan: BoundPlan, dtype: Any) -> Bridge:
    on_device = isinstance(plan.backend.arrays, DeviceArrays)
    return (DeviceBridge if on_device else Bridge)(plan, dtype, Order())


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
            op.kept[op.backend] = _bridge(op, _torch_dtype(op.op))
        return op.kept[op.backend]  # type: ignore[no-any-return]
    if not isinstance(op, LinearOperator):
        raise ArgumentError(f"linop.autograd: a LinearOperator or a plan expected, given {op!r}")
    dtype = _torch_dtype(op)
    for other in [key for key in list(op.kept) if isinstance(key, Backend) and key.ended]:
        op.kept.pop(other, None)
    there = op.H.kept.get(backend)
    # Compiling is collective: its condition depends only on calls that all workers made.
    op.kept[backend] = there.adjoint if there else _bridge(op.compile(backend), dtype)
    return op.kept[backend]  # type: ignore[no-any-return]


def _torch_dtype(op: LinearOperator) -> Any:
    if op.dtype.name not in _DTYPES:
        known = ", ".join(_DTYPES)
        raise DTypeError(f"{op!r}: its dtype is {op.dtype}; tensors of linop.autograd are {known}")
    return _DTYPES[op.dtype.name]


# Activation checkpointing


class _Local(threading.local):
    """Checkpointing state of a thread."""

    checkpoint: _Recording | _Replay | None = None
    replays = False
    """True if `checkpoint` replays results."""


_LOCAL = _Local()


def checkpoint_context() -> tuple[Any, Any]:
    """Context function for ``torch.utils.checkpoint.checkpoint(…, use_reentrant=False,
    context_fn=linop.autograd.checkpoint_context)``: results of operators are kept, and are not
    communicated again in the recomputation. So one worker may checkpoint layers that others do not.

    Returns:
        The contexts of the first computation, and of its recomputations.
    """
    recording = _Recording()
    return recording, _Replay(recording)


class _Recording:
    """Context that records the results of all plans called in it."""

    def __init__(self) -> None:
        self.kept: list[tuple[Bridge, Any, int]] = []

    def __enter__(self) -> None:
        self._before = _LOCAL.checkpoint
        _LOCAL.checkpoint = self

    def __exit__(self, *error: object) -> None:
        _LOCAL.checkpoint = self._before

    def run(self, bridge: Bridge, tensors: Sequence[Any]) -> tuple[Any, ...]:
        results = bridge.run(tensors)
        # A detached tensor shares memory and version counter with the original.
        seen = [result.detach() for result in results]
        self.kept.append((bridge, seen, sum(result._version for result in seen)))
        return results


class _Replay:
    """Context that replays recorded results, in order."""

    def __init__(self, recording: _Recording) -> None:
        self._recording = recording
        self._next = 0

    def __enter__(self) -> None:
        self._before = _LOCAL.checkpoint, _LOCAL.replays
        _LOCAL.checkpoint, _LOCAL.replays = self, True
        self._next = 0

    def __exit__(self, *error: object) -> None:
        _LOCAL.checkpoint, _LOCAL.replays = self._before

    def run(self, bridge: Bridge, tensors: Sequence[Any]) -> tuple[Any, ...]:
        if not self._next < len(self._recording.kept):
            raise BackendError(f"{bridge.plan!r}: was not called when this was computed first")
        plan, kept, version = self._recording.kept[self._next]
        self._next += 1
        if plan is not bridge:
            raise BackendError(f"{bridge.plan!r}: first, {plan.plan!r} was called here")
        if sum(tensor._version for tensor in kept) != version:
            raise BackendError(
                f"{bridge.plan!r}: a result that linop.autograd.checkpoint_context keeps was "
                f"changed in place; change a copy"
            )
        return tuple(tensor.detach() for tensor in kept)


def in_checkpoint() -> bool:
    """True if results of plans are recorded or replayed in this thread, for a checkpoint."""
    return _LOCAL.checkpoint is not None


def name_layer(error: LinopError, where: str, kind: str = "") -> None:
    """Prefix an error's text with the layer in which it was raised, unless it has one.

    Args:
        where: name of the layer.
        kind: class of the layer; removed from the start of the text.
    """
    if where and not error.layer:
        text = str(error).removeprefix(f"{kind}: ")
        error.args = (f"{where}: {text}", *error.args[1:])
        error.layer = where


def is_replaying() -> bool:
    """True if recorded results are replayed in this thread; see `checkpoint_context`."""
    return _LOCAL.replays


def run(bridge: Bridge, tensors: Sequence[Any]) -> tuple[Any, ...]:
    """Call a plan, recording or replaying its results under `checkpoint_context`."""
    checkpoint = _LOCAL.checkpoint
    return bridge.run(tensors) if checkpoint is None else checkpoint.run(bridge, tensors)
