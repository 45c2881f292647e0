"""A simulated device: the names of CuPy that linop uses, without a GPU, and as unforgiving.

Work is queued on a stream, and done as late as it can be: when somebody synchronises. Memory that
nobody has written reads as poison, and memory that is given back is given to the next who asks for
some on its stream, whoever else still reads it. An array refuses to become NumPy's but by ``get``.
So a synchronisation that is missing gives wrong values. MPI gets at an array as at one of CuPy's,
by ``__cuda_array_interface__``; the addresses are those of main memory, so that any MPI will do.

Messages between devices are those of `simulated_nccl`: what waits for one is done when somebody
asks whether it is, and by a thread after a while, since devices of peers may wait for it while the
host asks nothing of this one. It simulates what the order of work depends on, and no arithmetic of
CUDA.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from linop.backends.device.device_arrays import DeviceArrays
from linop.backends.device.host_memory import HostMemory
from linop.backends.device.tensors import Tensors
from support.device import simulated_nccl
from support.device.simulated_streams import LOCK, TORCH, Counts, Event, Stream, current

__version__ = "simulated"
POISON = 0xA5


class Device:
    shared = False
    """True if all processes of this machine have the same device."""

    def __init__(self, number: int = 0) -> None:
        self.id = number

    @property
    def pci_bus_id(self) -> str:
        return "0000:00:00.0" if Device.shared else f"simulated:{os.getpid()}"

    def use(self) -> None:
        pass

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *error: object) -> None:
        pass


def launch(work: Callable[[], None]) -> None:
    Counts.launches += 1
    current().add(work)


def _given_back(stream: Stream, memory: np.ndarray) -> None:
    with LOCK:
        stream.pool.setdefault(memory.size, []).append(memory)


class ndarray:  # as CuPy calls it
    """An array of the device. What it is made of is known at once, what is in it later."""

    __array_priority__ = 100
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, data: np.ndarray, base: ndarray | None = None) -> None:
        self.data_ = data
        self.base = base

    @staticmethod
    def new(shape: Any, dtype: Any) -> ndarray:
        like = np.empty(shape, dtype)
        if like.dtype.char in "gGO":
            raise ValueError(f"Unsupported dtype {like.dtype}")
        stream = current()
        with LOCK:
            used = stream.pool.get(like.nbytes)
            memory = used.pop() if used else None
        if memory is None:
            memory = np.full(like.nbytes, POISON, np.uint8)
        else:
            stream.add(lambda: memory.fill(POISON))
        array = ndarray(np.ndarray(like.shape, like.dtype, memory))
        weakref.finalize(array, _given_back, stream, memory).atexit = False
        return array

    def _view(self, data: np.ndarray) -> ndarray:
        return ndarray(data, self if self.base is None else self.base)

    # What is known at once

    shape = property(lambda self: self.data_.shape)
    dtype = property(lambda self: self.data_.dtype)
    size = property(lambda self: self.data_.size)
    data = property(lambda self: SimpleNamespace(ptr=self.data_.__array_interface__["data"][0]))
    ndim = property(lambda self: self.data_.ndim)
    strides = property(lambda self: self.data_.strides)
    itemsize = property(lambda self: self.data_.itemsize)
    nbytes = property(lambda self: self.data_.nbytes)

    @property
    def flags(self) -> Any:
        flags = self.data_.flags
        return SimpleNamespace(
            c_contiguous=flags.c_contiguous,
            f_contiguous=flags.f_contiguous,
            owndata=self.base is None,
        )

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if not Counts.visible:
            raise AttributeError("an array of the device was shown to somebody else")
        return {**self.data_.__array_interface__, "version": 3}

    def __array__(self, *args: Any, **options: Any) -> Any:
        raise TypeError("Implicit conversion to a NumPy array is not allowed; use .get()")

    def __len__(self) -> int:
        return len(self.data_)

    def view(self, dtype: Any) -> ndarray:
        return self._view(self.data_.view(dtype))

    def reshape(self, *shape: Any) -> ndarray:
        shaped = self.data_.reshape(*shape)
        if np.may_share_memory(shaped, self.data_) or not self.size:
            return self._view(shaped)
        return self.copy().reshape(*shape)

    def ravel(self) -> ndarray:
        return self.reshape(-1)

    # What is queued

    def __getitem__(self, index: Any) -> ndarray:
        if isinstance(index, ndarray):
            return lifted(lambda a, i: a[i])(self, index)
        part = self.data_[index]
        if not isinstance(part, np.ndarray):
            part = self.data_[(*np.atleast_1d(index), ...)]
        return self._view(part)

    def __setitem__(self, index: Any, value: Any) -> None:
        target, source = self.data_[index if index is not ... else (...,)], _read(value)
        launch(lambda: np.copyto(target, source, casting="same_kind"))

    def copy(self, order: str = "C") -> ndarray:
        return lifted(np.array)(self)

    def fill(self, value: Any) -> None:
        data = self.data_
        launch(lambda: data.fill(value))

    def astype(self, dtype: Any, copy: bool = True) -> ndarray:
        if not copy and self.dtype == dtype:
            return self
        return lifted(lambda a: a.astype(dtype))(self)

    def conj(self) -> ndarray:
        return lifted(np.conj)(self)

    def max(self) -> ndarray:
        return lifted(np.max)(self)

    def min(self) -> ndarray:
        return lifted(np.min)(self)

    def get(
        self,
        stream: Stream | None = None,
        order: str = "C",
        out: np.ndarray | None = None,
        blocking: bool = True,
    ) -> np.ndarray:
        stream = stream or current()
        target = np.empty(self.shape, self.dtype) if out is None else out
        assert target.shape == self.shape and target.dtype == self.dtype
        data = self.data_
        stream.add(lambda: np.copyto(target, data))
        if blocking:
            stream.synchronize()
        return target

    def set(self, array: np.ndarray, stream: Stream | None = None) -> None:
        assert self.flags.c_contiguous and isinstance(array, np.ndarray)
        assert array.shape == self.shape and array.dtype == self.dtype
        data, array = self.data_, array.view()  # its memory, whoever has it by then
        (stream or current()).add(lambda: np.copyto(data, array))

    def item(self) -> Any:
        return self.get().item()

    def __int__(self) -> int:
        return int(self.item())

    def __array_ufunc__(self, ufunc: Any, method: str, *given: Any, **options: Any) -> Any:
        return Ufunc(ufunc)(*given, **options) if method == "__call__" else NotImplemented

    def __array_function__(self, function: Any, types: Any, given: Any, options: Any) -> Any:
        known = globals().get(function.__name__)
        return NotImplemented if known is None else known(*given, **options)

    def __iadd__(self, other: Any) -> ndarray:
        return add(self, other, self)


def _read(value: Any) -> Any:
    """An operand of a kernel: the device's memory, or a number; main memory is refused."""
    if isinstance(value, ndarray):
        return value.data_
    if isinstance(value, np.ndarray):
        raise TypeError(f"Unsupported type {type(value)}")
    return value


def lifted(function: Callable[..., Any]) -> Callable[..., ndarray]:
    """A function of NumPy's as one that is queued: what it gives for zeros says of what shape."""

    def queued(*given: Any, **options: Any) -> ndarray:
        read = [_read(one) for one in given]
        zeros = [np.zeros_like(one) if isinstance(one, np.ndarray) else one for one in read]
        with np.errstate(all="ignore"):
            like = np.asarray(function(*zeros, **options))
        result = ndarray.new(like.shape, like.dtype)
        data = result.data_
        launch(lambda: np.copyto(data, function(*read, **options)))
        return result

    return queued


class Ufunc:
    """A ufunc: its last argument is where the result goes."""

    def __init__(self, ufunc: np.ufunc) -> None:
        self._ufunc = ufunc

    def __call__(self, *given: Any, out: Any = None, **options: Any) -> ndarray:
        out = out[0] if isinstance(out, tuple) else out
        given, out = given[: self._ufunc.nin], (*given[self._ufunc.nin :], out)[0]
        if out is None:
            return lifted(self._ufunc)(*given, **options)
        read, data = [_read(one) for one in given], out.data_
        launch(lambda: self._ufunc(*read, out=data, **options))
        return out


def _operator(ufunc: np.ufunc, swapped: bool = False) -> Callable[[Any, Any], ndarray]:
    call = Ufunc(ufunc)

    def method(self: ndarray, other: Any) -> ndarray:
        return call(other, self) if swapped else call(self, other)

    return method


_OPERATORS = {
    "add": np.add,
    "and": np.bitwise_and,
    "matmul": np.matmul,
    "mul": np.multiply,
    "rshift": np.right_shift,
    "sub": np.subtract,
}
for _name, _ufunc in _OPERATORS.items():
    setattr(ndarray, f"__{_name}__", _operator(_ufunc))
    setattr(ndarray, f"__r{_name}__", _operator(_ufunc, swapped=True))

add, subtract, multiply = Ufunc(np.add), Ufunc(np.subtract), Ufunc(np.multiply)


class ElementwiseKernel:
    """A kernel whose operation is Python, too."""

    def __init__(self, reads: str, writes: str, operation: str, name: str, **options: Any) -> None:
        parts = [part.split() for part in (*reads.split(","), *writes.split(","))]
        self._names = [part[-1] for part in parts]
        self._raw = [part[-1] for part in parts if part[0] == "raw"]
        self._code = compile(operation, name, "exec")

    def __call__(self, *given: Any) -> None:
        values = dict(zip(self._names, map(_read, given), strict=True))
        values |= {name: values[name].flat for name in self._raw}
        launch(lambda: exec(self._code, {}, values))


# Functions


def empty(shape: Any, dtype: Any = float) -> ndarray:
    return ndarray.new(shape, dtype)


def zeros(shape: Any, dtype: Any = float) -> ndarray:
    array = empty(shape, dtype)
    array.fill(0)
    return array


def asarray(array: Any) -> ndarray:
    if isinstance(array, ndarray):
        return array
    there = empty(np.shape(array), np.asarray(array).dtype)
    there.set(np.array(array))
    return there


def asnumpy(array: Any) -> np.ndarray:
    return array.get() if isinstance(array, ndarray) else np.asarray(array)


def size(array: ndarray) -> int:
    return int(array.size)


def ascontiguousarray(array: ndarray) -> ndarray:
    array = array if array.shape else array.reshape(1)  # as CuPy and NumPy do
    return array if array.flags.c_contiguous else array.copy()


def copyto(target: ndarray, source: ndarray) -> None:
    target[...] = source


def may_share_memory(one: ndarray, other: ndarray) -> bool:
    return np.may_share_memory(one.data_, other.data_)


def concatenate(arrays: list[ndarray]) -> ndarray:
    return lifted(lambda *given: np.concatenate(given))(*arrays)


def stack(arrays: list[ndarray]) -> ndarray:
    return lifted(lambda *given: np.stack(given))(*arrays)


cumsum, vdot, conj = lifted(np.cumsum), lifted(np.vdot), lifted(np.conj)
where, einsum = lifted(np.where), lifted(np.einsum)

cuda = SimpleNamespace(
    Stream=Stream,
    Event=Event,
    Device=Device,
    get_elapsed_time=lambda begin, end: (end.recorded - begin.recorded) * 1e3,
    runtime=SimpleNamespace(getDeviceCount=lambda: 1),
    get_current_stream=current,
    alloc_pinned_memory=lambda size: bytearray([POISON]) * size,
    nccl=simulated_nccl,
)


class _Sparse:
    def __init__(self, matrix: Any) -> None:
        self._matrix = matrix

    def __matmul__(self, x: ndarray) -> ndarray:
        return lifted(lambda a: self._matrix @ a)(x)


def _scipy(part: str) -> Any:
    import scipy.fft

    names = ("fftn", "ifftn", "rfftn", "irfftn")
    fft = SimpleNamespace(**{name: lifted(getattr(scipy.fft, name)) for name in names})
    return {"fft": fft, "sparse": SimpleNamespace(csr_matrix=_Sparse)}[part]


class _HostMemory(HostMemory):
    """The pool of pinned memory gives what was given back to somebody who writes to it."""

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        array = super().empty(shape, dtype)
        memory = np.frombuffer(array.base.base, np.uint8)
        weakref.finalize(array, memory.fill, POISON).atexit = False
        return array


class _Tensors(Tensors):
    """Tensors in main memory stand for the device's."""

    def array(self, tensor: Any) -> Any:
        return ndarray(tensor.numpy())

    def tensor(self, torch: Any, array: Any) -> Any:
        return torch.from_numpy(array.get())

    def stream(self, torch: Any) -> Any:
        return TORCH


def _arrays() -> DeviceArrays:
    """The device's arrays for linop's backends: this module stands for CuPy."""
    module = sys.modules[__name__]
    arrays = DeviceArrays(module, _scipy, device="cpu")
    arrays.host, arrays.tensors = _HostMemory(cuda, arrays.streams), _Tensors(module)
    return arrays


ARRAYS = _arrays()
ARRAYS.long = 2**18  # shorter than a GPU's, so that small tests have such boxes
