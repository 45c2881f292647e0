"""A plan as tensors meet it: their memory as arrays and back, the order of its calls, and what is
remembered of them. `linop.autograd` makes it part of torch's graph.
"""

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
"""By NumPy's name."""


def numpy_dtype(dtype: Any) -> np.dtype[Any]:
    """The dtype of operators on tensors of a dtype of torch's.

    Raises:
        DTypeError: there is none. MissingExtraError: bfloat16 is of a package that is not there.
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
    """The dtype of tensors that an operator on a dtype takes."""
    return _DTYPES[dtype.name]


def is_of(x: Any, dtype: Any) -> bool:
    """Whether it is a tensor of that dtype."""
    return isinstance(x, torch.Tensor) and x.dtype is dtype


class Order:
    """The calls of a plan and its adjoint through the bridge, by number, on this worker.

    Two backward passes may come in any order, if it is the same everywhere: where it was another on
    one worker, gradients of one pass would be added to those of the other. So a worker asks all
    others, but where it takes back the last call that it has not taken back. That two workers take
    back different calls, and none of them asks, cannot be.
    """

    def __init__(self) -> None:
        self._calls = 0
        self.last = 0

    def opened(self) -> int:
        """The number of a new call."""
        if _LOCAL.replays:
            return 0  # the call that it replays has one
        self._calls += 1
        self.last = self._calls
        return self._calls


def _of_bits(array: Array) -> Any:
    """A tensor with the memory of an array of bfloat16, which torch takes from no array."""
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)


class Bridge:
    """A plan as the bridge calls it.

    Attributes:
        anchor: a leaf, and an input of every application, so that its result needs a gradient on
            every worker: backward runs on all of them or none, whatever the tensors that one of
            them happens to have. Each worker's is its own: torch's anomaly mode holds the lock of
            a leaf's node while it waits for the interpreter, so that threads with one leaf in
            common wait for each other for ever.
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
        """Before the adjoint of a call of the other plan: see that all do that one."""
        if call and (call != self.order.last or self._debug):
            self.plan.meet(call)
        if call:
            self.order.last = call - 1

    def zeros(self) -> list[Any]:
        """A zero argument."""
        pairs = zip(self._into, self._kinds, strict=True)
        made = [torch.zeros(r.shape, dtype=self.dtype, device=kind.device) for r, kind in pairs]
        return made or [torch.zeros_like(self._nothing)]

    def tensors(self, x: Any) -> list[Any]:
        """What a user passed, in the order of the regions held here; one at least."""
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
        """Under autocast: as torch's own functions, and custom_fwd's cast_inputs, see it."""
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
        """The plan finds what is wrong, so that all workers hear of it."""
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
        """A tensor's memory as an array; its shape is the plan's affair."""
        if is_of(tensor, self.dtype):
            try:
                array: Array = tensor.numpy()
                return array
            except (RuntimeError, TypeError):
                pass  # it is none of the usual ones, which is found out at no cost to those
        self._check(number, tensor)
        try:
            if self.dtype is torch.bfloat16:  # NumPy's is another package's
                bits: Array = tensor.detach().view(torch.int16).numpy(force=True)
                return bits.view(self.plan.op.dtype)
            array = tensor.numpy(force=True)  # resolves conj and neg views, which are lazy
        except (RuntimeError, TypeError) as error:
            raise self._unread(number, error) from None
        return array

    def _check(self, number: int, tensor: Any) -> None:
        """Check that it is a tensor of the right kind.

        Raises:
            ArgumentError, DTypeError: it is not.
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
        """Tensors in the order of the regions held here, as users meet them."""
        if len(self._out_of) < 2:
            return tensors[0]
        return {r.name: t for r, t in zip(self._out_of, tensors, strict=True)}


class DeviceBridge(Bridge):
    """The same on a device: arrays share memory with tensors by DLPack, and a plan's work is queued
    on torch's current stream, where that of the tensors is."""

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
                # With tensors in main memory torch's graph does not order streams.
                self._arrays.mark().synchronize()
            return results

    def _array(self, number: int, tensor: Any) -> Array:
        if self._kinds[number] is not self._arrays:
            return super()._array(number, tensor)
        self._check(number, tensor)
        try:
            plain = tensor.detach().resolve_conj().resolve_neg()
            if self.dtype is torch.bfloat16:  # the module's is another package's
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
    """The plan of an operator on a backend: compiled at the first call, and kept with the operator.

    The operator, and not the backend, keeps it: it goes with the operator, or when the backend's
    program has ended and the operator is compiled for another one.

    Args:
        op: a `LinearOperator`, or a `BoundPlan`, which has its backend.
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
    # Compiling is collective: what is done here depends on what all workers have called, alone.
    op.kept[backend] = there.adjoint if there else _bridge(op.compile(backend), dtype)
    return op.kept[backend]  # type: ignore[no-any-return]


def _torch_dtype(op: LinearOperator) -> Any:
    if op.dtype.name not in _DTYPES:
        known = ", ".join(_DTYPES)
        raise DTypeError(f"{op!r}: its dtype is {op.dtype}; tensors of linop.autograd are {known}")
    return _DTYPES[op.dtype.name]


# Activation checkpointing


class _Local(threading.local):
    """What a thread's calls are part of."""

    memory: _Recording | _Replay | None = None
    replays = False
    """Whether `memory` gives results again."""


_LOCAL = _Local()


def remembering() -> tuple[Any, Any]:
    """For ``torch.utils.checkpoint.checkpoint(…, use_reentrant=False,
    context_fn=linop.autograd.remembering)``: what operators gave is kept, and where the rest is
    computed again, it is not communicated again. So one worker may checkpoint what others do not.

    Returns:
        The contexts of the first computation, and of those that repeat it.
    """
    recording = _Recording()
    return recording, _Replay(recording)


class _Recording:
    """Keeps the results of all plans called inside."""

    def __init__(self) -> None:
        self.kept: list[tuple[Bridge, Any, int]] = []

    def __enter__(self) -> None:
        self._before = _LOCAL.memory
        _LOCAL.memory = self

    def __exit__(self, *error: object) -> None:
        _LOCAL.memory = self._before

    def run(self, bridge: Bridge, tensors: Sequence[Any]) -> tuple[Any, ...]:
        results = bridge.run(tensors)
        # A detached tensor sees the changes, and counts them with the one it is from.
        seen = [result.detach() for result in results]
        self.kept.append((bridge, seen, sum(result._version for result in seen)))
        return results


class _Replay:
    """Gives them again, in their order."""

    def __init__(self, recording: _Recording) -> None:
        self._recording = recording
        self._next = 0

    def __enter__(self) -> None:
        self._before = _LOCAL.memory, _LOCAL.replays
        _LOCAL.memory, _LOCAL.replays = self, True
        self._next = 0

    def __exit__(self, *error: object) -> None:
        _LOCAL.memory, _LOCAL.replays = self._before

    def run(self, bridge: Bridge, tensors: Sequence[Any]) -> tuple[Any, ...]:
        if not self._next < len(self._recording.kept):
            raise BackendError(f"{bridge.plan!r}: was not called when this was computed first")
        plan, kept, version = self._recording.kept[self._next]
        self._next += 1
        if plan is not bridge:
            raise BackendError(f"{bridge.plan!r}: first, {plan.plan!r} was called here")
        if sum(tensor._version for tensor in kept) != version:
            raise BackendError(
                f"{bridge.plan!r}: a result that linop.autograd.remembering keeps was changed in "
                f"place; change a copy"
            )
        return tuple(tensor.detach() for tensor in kept)


def is_remembering() -> bool:
    """Whether results of plans are kept here, or given again: see `remembering`."""
    return _LOCAL.memory is not None


def name_layer(error: LinopError, where: str, kind: str = "") -> None:
    """Make an error say in which layer of which network it was raised, if it does not.

    Args:
        where: the layer.
        kind: the layer's class, with which the text may begin.
    """
    if where and not error.layer:
        text = str(error).removeprefix(f"{kind}: ")
        error.args = (f"{where}: {text}", *error.args[1:])
        error.layer = where


def is_replaying() -> bool:
    """True if results that were kept are given again: see `remembering`."""
    return _LOCAL.replays


def run(bridge: Bridge, tensors: Sequence[Any]) -> tuple[Any, ...]:
    """Call a plan, or remember what it gave."""
    memory = _LOCAL.memory
    return bridge.run(tensors) if memory is None else memory.run(bridge, tensors)
