"""Array module of a device: CuPy, or a module with the same names; its streams, events and pinned
host memory.

Operations are queued on the stream that is current in the calling thread (`cupy.cuda.Stream`), and
run in its order; exceptions are documented here. The host waits in three cases only: for an event
before MPI reads a packed message (`linop.backends.device.staging`), for copies from and to regions
in host memory (`linop.backends.device.host_transfer`), and for messages of other threads to such
regions (`arrived`).

- A run follows the last run of the same plan, even on another stream (`following`).
- A message between threads is an array computed on the sender's stream, for which the receiver's
stream waits; the receiver keeps it alive until its own stream has read it (`Message`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from importlib import import_module
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from linop.backends.execution.arrays import Arrays
from linop.backends.execution.instructions import Instruction
from linop.errors import BackendError, DTypeError, MissingExtraError
from linop.spaces.scalars import Array, Scalar


class DeviceArrays(Arrays):
    """Array module of a device.

    Args:
        module: CuPy, or a module with its names.
        scipy: ``scipy(name)``: the counterpart of a SciPy submodule for these arrays.
        device: torch's device type of tensors that share memory with these arrays.
    """

    asynchronous = True
    plain = "c_contiguous"
    wide_items = False
    small = 0  # its memory pool is as fast

    def __init__(self, module: Any, scipy: Callable[[str], Any], device: str = "cuda") -> None:
        self.module = module
        self.name = module.__name__
        self.ndarray = module.ndarray
        self.device = device
        self.memory = f"memory of a {device} device"
        self.host = Pinned(self)
        self._scipy = scipy
        self._kept: deque[tuple[Any, Any]] = deque()
        self._lock = threading.Lock()
        self._dtypes: set[np.dtype[Any]] = set()
        self._kernels: dict[str, Any] = {}

    # Arrays

    def put(self, array: Any) -> Array:
        there: Array = self.module.asarray(array)
        return there

    def taken(self, result: Any) -> Any:
        return result

    def scipy(self, part: str) -> Any:
        return self._scipy(part)

    def of(self, memory: str) -> Arrays:
        return self.host if memory == "host" else self

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        array: Array = self.module.empty(shape, dtype)
        return array

    def fetched(self, array: Array) -> Array:
        here: Array = self.module.asnumpy(array)
        return here

    def may_share_memory(self, one: Array, other: Array) -> bool:
        kinds = {type(one), type(other)}
        if len(kinds) > 1:
            return False
        if self.ndarray not in kinds:
            return super().may_share_memory(one, other)
        return bool(self.module.may_share_memory(one, other))

    def near(self, arrays: Sequence[Array]) -> Iterable[tuple[int, int]]:
        return combinations(range(len(arrays)), 2)

    def writeable(self, array: Array) -> bool:
        return getattr(array.flags, "writeable", True)

    def check_dtype(self, dtype: np.dtype[Any]) -> None:
        if dtype in self._dtypes:
            return
        try:
            one = self.module.zeros((), dtype)
            self.module.add(one, one)
        except (TypeError, ValueError) as error:
            raise DTypeError(f"{self.name} has no arrays of {dtype}: {error}") from None
        self._dtypes.add(dtype)

    def multiple_added(self, dtype: np.dtype[Any], scale: Scalar) -> Callable[..., Any] | None:
        if not self.has_kernels(dtype):
            return None
        # Two roundings, as on the host: the compiler would fuse multiply and add.
        kernel = self._kernel("multiple_added", "T x, T a", "T y", "y += a * x", ("--fmad=false",))
        factor = dtype.type(scale)
        return lambda target, source: kernel(source, factor, target)

    def boxes(self, accumulate: bool) -> Callable[..., Any]:
        """Kernel ``f(source, of, to, target)`` that copies, or adds, elements ``source[of]`` to
        ``target[to]``, with flat indices."""
        kind, value = ("boxes_added", "y[to] + x[of]") if accumulate else ("boxes", "x[of]")
        kernel: Callable[..., Any] = self._kernel(
            kind, "raw T x, I of, I to", "raw T y", f"y[to] = {value}"
        )
        return kernel

    def has_kernels(self, dtype: np.dtype[Any]) -> bool:
        """True if kernels can be compiled for a dtype."""
        return dtype.kind != "V"

    def _kernel(self, name: str, reads: str, writes: str, text: str, options: Any = ()) -> Any:
        if name not in self._kernels:
            self._kernels[name] = self.module.ElementwiseKernel(
                reads, writes, text, f"linop_{name}", options=options
            )
        return self._kernels[name]

    def use(self, local: int, number: int | None = None) -> None:
        """Set the current device of this thread.

        Args:
            local: this rank's number on its machine; the default device is this modulo the number
                of devices.
            number: index of the device.

        Raises:
            BackendError: there is no such device.
        """
        there = self.module.cuda.runtime.getDeviceCount()
        if number is not None and not 0 <= number < there:
            raise BackendError(f"device {number} wanted; there are {there}")
        self.module.cuda.Device(local % there if number is None else number).use()

    # Tensors

    def of_tensor(self, tensor: Any) -> Array:
        """Array that shares memory with a tensor."""
        array: Array = self.module.from_dlpack(tensor)
        return array

    def to_tensor(self, torch: Any, array: Array) -> Any:
        """Tensor that shares memory with an array."""
        return torch.from_dlpack(array)

    def stream_of(self, torch: Any) -> AbstractContextManager[Any]:
        """Context in which operations are queued on torch's current stream."""
        cuda = self.module.cuda
        stream = torch.cuda.current_stream(cuda.Device().id)
        if hasattr(cuda.Stream, "from_external") and hasattr(stream, "__cuda_stream__"):
            entered: AbstractContextManager[Any] = cuda.Stream.from_external(stream)
        else:  # before CuPy 14
            entered = cuda.ExternalStream(stream.cuda_stream)
        return entered

    # Streams and events

    @property
    def stream(self) -> Any:
        """Current stream of this thread."""
        return self.module.cuda.get_current_stream()

    def mark(self) -> Any:
        """Event after all operations queued so far: ``.done``, ``.synchronize()``."""
        event = self.module.cuda.Event(disable_timing=True)
        event.record(self.stream)
        return event

    def adapted(
        self, instructions: Iterable[Instruction], dtype: np.dtype[Any]
    ) -> tuple[Sequence[Instruction], Callable[[], None] | None]:
        # They know this module.
        from linop.backends.device.fused_copies import fused
        from linop.backends.device.host_transfer import Crossing

        crossing = Crossing(self)
        crossed = crossing.crossed(instructions, dtype)
        return list(fused(crossed, self, dtype)), crossing.settle

    def following(self) -> Callable[[], None]:
        last: list[Any] = [self.stream]

        def follow() -> None:
            stream = self.stream
            if stream != last[0]:
                event = self.module.cuda.Event(disable_timing=True)
                event.record(last[0])
                stream.wait_event(event)
                last[0] = stream

        return follow

    @contextmanager
    def _entered(self, device: Any, stream: Any) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(device)
            stack.enter_context(stream)
            yield

    def surroundings(self) -> AbstractContextManager[Any]:
        return self._entered(self.module.cuda.Device(), self.stream)

    # Messages between threads

    def message(self, array: Array) -> Any:
        """A message for another thread, from an array in device or host memory."""
        return array if isinstance(array, np.ndarray) else Message(array, self.stream, self.mark())

    def arrived(self, message: Any, here: bool) -> Array:
        """Array of a message, in host memory (`here`) or on the device; a copy if it is in the
        other memory. A copy to host memory is waited for."""
        if isinstance(message, np.ndarray):
            return message if here else self.put(message)
        if self.stream != message.stream:
            self.stream.wait_event(message.ready)
        return self.fetched(message.array) if here else message.array

    def keep(self, messages: Iterable[Any]) -> None:
        """Keep messages alive until this stream has read them: the sender's memory pool would reuse
        their memory on its own stream."""
        stream = self.stream
        read = [m for m in messages if isinstance(m, Message) and m.stream != stream]
        if not read:
            return
        self.hold([(self.mark(), read)])
        self._let_go()

    def hold(self, read: Iterable[tuple[Any, Any]]) -> None:
        """Keep objects alive until an event is done; takes pairs of event and object. Safe in
        finalizers: it neither waits nor takes a lock."""
        self._kept.extend(read)

    def _let_go(self) -> None:
        with self._lock:
            while self._kept and self._kept[0][0].done:
                self._kept.popleft()

    # Copies from and to host memory

    def pinned(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """New array in pinned host memory, from and to which copies are asynchronous."""
        self._let_go()
        size = int(np.prod(shape, dtype=np.int64))
        memory = self.module.cuda.alloc_pinned_memory(max(1, size * dtype.itemsize))
        return np.frombuffer(memory, dtype, size).reshape(shape)

    def down(self, source: Array, target: Array) -> Any:
        """Queue a copy of a contiguous device array to a pinned one; returns the event of its
        end."""
        source.get(stream=self.stream, out=target, blocking=False)  # type: ignore[attr-defined]
        return self.mark()

    def up(self, source: Array, target: Array) -> None:
        """Queue a copy of a pinned array to a contiguous device array."""
        target.set(source, stream=self.stream)  # type: ignore[attr-defined]


class Pinned(Arrays):
    """Array module of the host regions of plans on a device: new arrays are pinned."""

    def __init__(self, device: DeviceArrays) -> None:
        self._device = device

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        return self._device.pinned(shape, dtype)

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        array = self.empty(shape, dtype)
        array.fill(0)
        return array


class Message(NamedTuple):
    """A device array sent from one thread to another."""

    array: Array
    stream: Any
    ready: Any
    """Event after which the array has its contents."""

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.array.dtype

    @property
    def size(self) -> int:
        return self.array.size


@cache
def cupy_arrays() -> DeviceArrays:
    """Array module of CuPy.

    Raises:
        MissingExtraError: CuPy is not installed. BackendError: it finds no GPU.
    """
    try:
        import cupy
    except ImportError as error:
        raise MissingExtraError(
            f"arrays on GPUs need CuPy: pip install 'linop-algebra[cupy]' ({error})"
        ) from None
    why = no_device(cupy)
    if why:
        raise BackendError(
            f"CuPy finds no GPU: {why}. Plans of the backends 'threads' and 'mpi' run without one"
        )
    return DeviceArrays(cupy, lambda part: import_module(f"cupyx.scipy.{part}"))


def no_device(cupy: Any) -> str:
    """Reason for which CuPy finds no GPU; empty if it finds one."""
    try:
        return "" if cupy.cuda.runtime.getDeviceCount() else "the driver knows none"
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return str(error)
