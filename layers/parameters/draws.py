"""Random parameters of which a worker makes its block alone, with the numbers that torch draws for
the whole tensor.

A module of torch is constructed without memory, on the meta device, while a `Recorder` notes how
its parameters are filled. `replay` then draws the same numbers in pieces of 256 KiB, from torch's
own generator, and keeps those of the block. Torch's generator for CPUs (a Mersenne Twister) gives
one number after the other, so that pieces have the bits of the whole (tested), in about half the
time: they stay in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_PIECE = 1 << 16
"""Elements that are drawn at once."""
_ALIGNED = 16
"""`Tensor.normal_` draws so many elements together; of fewer than these it draws otherwise."""
_RANDOM = ("uniform_", "normal_")
_CONSTANT = {"zero_": "zero_", "fill_": "fill_"}
_VIEWS = ("detach", "alias", "select", "slice", "view", "view_as_real")


class Fill(NamedTuple):
    """One step of filling a parameter: a function of torch on a range of its elements."""

    name: str
    """Of the parameter."""
    shape: tuple[int, ...]
    """Of the whole parameter."""
    dtype: torch.dtype
    """Of the parameter, where no worker says another one."""
    function: str
    arguments: tuple[Any, ...]
    start: int
    """First element of the range, row by row; of the real parts, if it is of these."""
    stop: int
    of_parts: bool
    """True if it is of the real and imaginary parts of complex elements."""

    @property
    def random(self) -> bool:
        return self.function in _RANDOM


class UnknownFillError(Exception):
    """A module fills its parameters in a way that `Recorder` does not know."""


class Recorder(TorchDispatchMode):
    """Mode in which tensors are made on the meta device, and the functions that fill them are
    recorded instead of called.

    Raises:
        UnknownFillError: in the mode, from any function that it does not know.
    """

    def __init__(self) -> None:
        super().__init__()
        self._devices: dict[int, torch.device] = {}
        self._made: list[Tensor] = []  # whose storages keep their addresses
        self._fills: list[tuple[int, Fill]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, func._schema.name.removeprefix("aten::")
        if name == "empty":
            device = kwargs.get("device") or torch.device("cpu")
            made = func(*args, **{**kwargs, "device": torch.device("meta"), "pin_memory": False})
            self._devices[_storage(made)] = device
            self._made.append(made)
            return made
        if name in _VIEWS:
            return func(*args, **kwargs)
        if name in (*_RANDOM, *_CONSTANT) and _storage(args[0]) in self._devices:
            self._record(name, *args)
            return args[0]
        raise UnknownFillError(func._schema.name)

    def _record(self, name: str, x: Tensor, *arguments: Any) -> None:
        whole = next(one for one in self._made if _storage(one) == _storage(x))
        of_parts = whole.is_complex() and not x.is_complex()
        tensors = any(isinstance(one, Tensor) for one in arguments)
        if tensors or not x.is_contiguous() or (x.dtype != whole.dtype and not of_parts):
            raise UnknownFillError(name)
        start = int(x.storage_offset())
        stop = start + x.numel()
        made = Fill("", tuple(whole.shape), whole.dtype, name, arguments, start, stop, of_parts)
        self._fills.append((_storage(x), made))

    def device_of(self, x: Any) -> torch.device | None:
        """The device on which a tensor was asked for; None if it was not made in this mode."""
        return self._devices.get(_storage(x)) if isinstance(x, Tensor) and x.is_meta else None

    def fills(self, names: Sequence[tuple[str, Tensor]] = ()) -> tuple[Fill, ...]:
        """The fills in their order, with the names of the parameters that they are of.

        Raises:
            UnknownFillError: a parameter is not filled as a whole first.
        """
        found: dict[int, str] = {_storage(x): name for name, x in names}
        first: dict[int, Fill] = {}
        for storage, fill in self._fills:
            first.setdefault(storage, fill)
        for made in self._made:
            n = made.numel() * (2 if (f := first.get(_storage(made))) and f.of_parts else 1)
            if n and (f is None or (f.start, f.stop) != (0, n)):
                raise UnknownFillError("empty")
        return tuple(f._replace(name=found.get(storage, "")) for storage, f in self._fills)


def recorded_fills(make: Callable[[], Any]) -> tuple[Any, Recorder] | None:
    """The result of `make`, without memory, and the recorder of how it is filled; None if it is
    filled in other ways than by torch's initialisers of layers."""
    recorder = Recorder()
    try:
        with recorder:
            made = make()
        recorder.fills()
    except UnknownFillError:
        return None
    return made, recorder


class Target(NamedTuple):
    """The numbers that a worker needs of a parameter that is filled.

    Args:
        block: this worker's; None on workers without one.
        where: slices of the block in the parameter.
        dtype, device: of the parameter, on all workers.
    """

    block: Tensor | None
    where: tuple[slice, ...]
    dtype: torch.dtype
    device: torch.device


@torch.no_grad()
def replay(fills: Sequence[Fill], target_of: Callable[[Fill], Target]) -> None:
    """Fill this worker's blocks, and take from torch's generator what the whole parameters take,
    whether this worker has blocks or not."""
    for fill in fills:
        target = target_of(fill)
        shape, where, block, dtype = fill.shape, target.where, target.block, target.dtype
        if fill.of_parts:
            dtype = dtype.to_real()
            shape, where = (*shape, 2), (*where, slice(0, 2))
            block = None if block is None else torch.view_as_real(block)
        whole = (fill.start, fill.stop) == (0, prod(shape))
        if fill.random:
            _draw(fill, shape, where, block, dtype, target.device)
        elif block is not None and whole:
            getattr(block, fill.function)(*fill.arguments)
        elif block is not None:
            part = torch.empty(fill.stop - fill.start, dtype=dtype, device=target.device)
            getattr(part, fill.function)(*fill.arguments)
            _keep(part, fill.start, shape, where, block)


def _draw(
    fill: Fill,
    shape: tuple[int, ...],
    where: tuple[slice, ...],
    block: Tensor | None,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Draw the numbers of a fill in pieces, and keep those of the block. On a device it is one
    piece: there the numbers depend on how many are drawn together."""
    n = fill.stop - fill.start
    step = _PIECE if device.type == "cpu" else max(n, 1)
    memory = torch.empty(min(n, step + _ALIGNED), dtype=dtype, device=device)
    start = 0
    while start < n:
        stop = start + step if n - start >= step + _ALIGNED else n
        piece = memory[: stop - start]
        getattr(piece, fill.function)(*fill.arguments)
        if block is not None and block.numel():
            _keep(piece, fill.start + start, shape, where, block)
        start = stop


def _keep(
    piece: Tensor, start: int, shape: tuple[int, ...], where: tuple[slice, ...], block: Tensor
) -> None:
    """Copy what belongs to a block, from a run of a tensor's elements, row by row.

    Args:
        start: number of the piece's first element in the tensor.
        shape: of the tensor.
        where: slices of the block.
    """
    if not piece.numel():
        return
    if not shape:
        block.copy_(piece[0])
        return
    row, (rows, *rest) = prod(shape[1:]), where
    stop = start + piece.numel()
    first, last = -(-start // row), stop // row  # whole rows
    if first < last:
        low, high = max(first, rows.start), min(last, rows.stop)
        if low < high:
            whole = piece[low * row - start : high * row - start].view(high - low, *shape[1:])
            block[low - rows.start : high - rows.start] = whole[(slice(None), *rest)]
    edges = [(start, min(stop, first * row)), (max(start, last * row), stop)]
    for a, b in dict.fromkeys(edges):  # one, if the piece is within a row
        k = a // row
        if a < b and rows.start <= k < rows.stop:
            _keep(
                piece[a - start : b - start],
                a - k * row,
                shape[1:],
                (*rest,),
                block[k - rows.start],
            )


def materialise(holder: Any, device: Any, names: Sequence[str] | None = None) -> None:
    """Allocate memory on a device for a module's own parameters and buffers that are on the meta
    device. They stay the same objects, to which an optimizer or another module may refer.

    Args:
        names: which; by default all.
    """
    for name, x in (holder._parameters | holder._buffers).items():
        if x is not None and x.is_meta and (names is None or name in names):
            with_memory(x, device)


def with_memory(x: Tensor, device: Any) -> None:
    """Give a tensor on the meta device memory, without values, on another."""
    memory = torch.empty_like(x, device=device)
    if isinstance(x, torch.nn.Parameter):
        memory = torch.nn.Parameter(memory, x.requires_grad)
    memory.__class__ = x.__class__
    memory.__dict__.update(x.__dict__)
    torch.utils.swap_tensors(x, memory)


def _storage(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)
