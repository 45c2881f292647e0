"""Arrays of a device: CuPy's, or those of a module that has the same names.

Work is queued on the stream that is current in the thread that calls (`cupy.cuda.Stream`), and done
in its order. What leaves that order says so here. The host waits in three places alone: for a mark
before MPI reads what was packed (`linop.backends.device.staging`), for copies from and to regions
in main memory (`linop.backends.device.host_transfer`), and for what other threads send to those
(`arrived`).

- A run follows the last one of the same plan, whatever their streams (`following`).
- A message between threads is an array that the sender's stream makes and the receiver's stream
  waits for; the receiver keeps it until its own stream has read it (`Message`).
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
from linop.errors import BackendError, DTypeError, MissingExtraError
from linop.spaces.scalars import Array, Scalar


class DeviceArrays(Arrays):
    """Arrays of a module like CuPy.

    Args:
        module: has CuPy's names.
        scipy: gives the module of SciPy's functions for these arrays, by its name.
        device: the type of the device of tensors that share memory with them.
    """

    asynchronous = True
    plain = "c_contiguous"
    wide_items = False

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
        # Two roundings, as everywhere else: the compiler would make one of them.
        kernel = self._kernel("multiple_added", "T x, T a", "T y", "y += a * x", ("--fmad=false",))
        factor = dtype.type(scale)
        return lambda target, source: kernel(source, factor, target)

    def boxes(self, accumulate: bool) -> Callable[..., Any]:
        """What copies elements of an array to another, or adds them, by indices into both as if
        they were flat: ``f(source, of, to, target)``."""
        kind, value = ("boxes_added", "y[to] + x[of]") if accumulate else ("boxes", "x[of]")
        kernel: Callable[..., Any] = self._kernel(
            kind, "raw T x, I of, I to", "raw T y", f"y[to] = {value}"
        )
        return kernel

    def has_kernels(self, dtype: np.dtype[Any]) -> bool:
        """Whether there are such functions for a dtype."""
        return dtype.kind != "V"

    def _kernel(self, name: str, reads: str, writes: str, text: str, options: Any = ()) -> Any:
        if name not in self._kernels:
            self._kernels[name] = self.module.ElementwiseKernel(
                reads, writes, text, f"linop_{name}", options=options
            )
        return self._kernels[name]

    def use(self, local: int, number: int | None = None) -> None:
        """Make a device the current one of this thread.

        Args:
            local: this rank's number on its machine, which chooses one where none is given.

        Raises:
            BackendError: there is no such device.
        """
        there = self.module.cuda.runtime.getDeviceCount()
        if number is not None and not 0 <= number < there:
            raise BackendError(f"device {number} wanted; there are {there}")
        self.module.cuda.Device(local % there if number is None else number).use()

    # Tensors

    def of_tensor(self, tensor: Any) -> Array:
        """A tensor's memory as an array."""
        array: Array = self.module.from_dlpack(tensor)
        return array

    def to_tensor(self, torch: Any, array: Array) -> Any:
        """An array's memory as a tensor."""
        return torch.from_dlpack(array)

    def stream_of(self, torch: Any) -> AbstractContextManager[Any]:
        """Inside, work is queued on torch's current stream."""
        cuda = self.module.cuda
        stream = torch.cuda.current_stream(cuda.Device().id)
        if hasattr(cuda.Stream, "from_external") and hasattr(stream, "__cuda_stream__"):
            entered: AbstractContextManager[Any] = cuda.Stream.from_external(stream)
        else:  # before CuPy 14
            entered = cuda.ExternalStream(stream.cuda_stream)
        return entered

    # Order

    @property
    def stream(self) -> Any:
        """The stream of this thread."""
        return self.module.cuda.get_current_stream()

    def mark(self) -> Any:
        """What the stream has to do until now: ``.done``, ``.synchronize()``."""
        event = self.module.cuda.Event(disable_timing=True)
        event.record(self.stream)
        return event

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

    # Messages of threads

    def message(self, array: Array) -> Any:
        """An array, of the device or in main memory, for another thread."""
        return array if isinstance(array, np.ndarray) else Message(array, self.stream, self.mark())

    def arrived(self, message: Any, here: bool) -> Array:
        """A message's array, in main memory or on the device; where that is another memory than it
        came in, a copy, which is waited for on the way to main memory."""
        if isinstance(message, np.ndarray):
            return message if here else self.put(message)
        if self.stream != message.stream:
            self.stream.wait_event(message.ready)
        return self.fetched(message.array) if here else message.array

    def keep(self, messages: Iterable[Any]) -> None:
        """Messages that this stream reads stay until it has: the pool would give their memory to
        the next that asks for some on the sender's stream."""
        stream = self.stream
        read = [m for m in messages if isinstance(m, Message) and m.stream != stream]
        if not read:
            return
        self.hold([(self.mark(), read)])
        self._let_go()

    def hold(self, read: Iterable[tuple[Any, Any]]) -> None:
        """Memory stays until a mark is done. It may be called when an object goes away, which is at
        any moment: it waits for nothing, and takes no lock."""
        self._kept.extend(read)

    def _let_go(self) -> None:
        with self._lock:
            while self._kept and self._kept[0][0].done:
                self._kept.popleft()

    # Copies from and to main memory

    def pinned(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """An array in pinned main memory: what is copied from and to it is not waited for."""
        self._let_go()
        size = int(np.prod(shape, dtype=np.int64))
        memory = self.module.cuda.alloc_pinned_memory(max(1, size * dtype.itemsize))
        return np.frombuffer(memory, dtype, size).reshape(shape)

    def down(self, source: Array, target: Array) -> Any:
        """Begin to copy a contiguous array to a pinned one; the mark of its end."""
        source.get(stream=self.stream, out=target, blocking=False)  # type: ignore[attr-defined]
        return self.mark()

    def up(self, source: Array, target: Array) -> None:
        """Begin to copy a pinned array to a contiguous one."""
        target.set(source, stream=self.stream)  # type: ignore[attr-defined]


class Pinned(Arrays):
    """NumPy's arrays for the regions in main memory of plans on a device: new ones are pinned."""

    def __init__(self, device: DeviceArrays) -> None:
        self._device = device

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        return self._device.pinned(shape, dtype)

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        array = self.empty(shape, dtype)
        array.fill(0)
        return array


class Message(NamedTuple):
    """An array on its way from one thread to another."""

    array: Array
    stream: Any
    ready: Any
    """The mark after which it is there."""

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.array.dtype

    @property
    def size(self) -> int:
        return self.array.size


@cache
def cupy_arrays() -> DeviceArrays:
    """CuPy's arrays.

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
    """Why there is no GPU; empty if there is one."""
    try:
        return "" if cupy.cuda.runtime.getDeviceCount() else "the driver knows none"
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return str(error)
