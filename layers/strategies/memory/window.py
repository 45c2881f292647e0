"""The window of a chain: some consecutive modules whose saved tensors are in the memory in which
the program computes. In forward it moves up the chain, and O moves out what leaves it; in backward
it moves down, and O.H brings in what enters it (`linop.strategies.memory.moving`)."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from linop.errors import BackendError
from linop.layers.agreement.input_agreement import program_backend
from linop.strategies.memory.moving import Move, Mover, NoMove


class Piece:
    """Memory of saved tensors, which lives as long as torch's graph has one of them.

    Args:
        x: a tensor in it.
        begin, end: of the piece in the tensor's storage, in bytes.

    Attributes:
        here: its bytes in the memory in which the program computes, or None; away: the same in the
            other memory.
    """

    def __init__(self, mover: Mover, x: Tensor, begin: int, end: int) -> None:
        self._mover, self._device = mover, x.device
        self.size = end - begin
        with torch.no_grad():
            memory = torch.empty(0, dtype=torch.uint8, device=x.device)
            self.here: Tensor | None = memory.set_(x.untyped_storage(), begin, (self.size,), (1,))
        self._given: Tensor | None = x.detach()  # shares its version
        self._version = x._version
        self._changed = False
        self.away: Tensor | None = None
        self._move: Move | NoMove | None = None
        self.leaving = False

    def leave(self) -> None:
        """Start O, unless the bytes are away: then those here are let go."""
        self.settle()
        self._check()
        if self.away is not None:
            self.here = None
        elif self.here is not None:
            self.leaving = True
            self._begin(self._mover.out(self.here))

    def enter(self) -> None:
        """Start O.H, unless the bytes are here."""
        self.settle()
        if self.here is None:
            assert self.away is not None
            self.here = torch.empty(self.size, dtype=torch.uint8, device=self._device)
            self._begin(self._mover.back(self.away, self.here))

    def _begin(self, move: Move | NoMove) -> None:
        self._move = move
        self._mover.moving[self] = None
        if not self._mover.asynchronous:
            self.settle()

    def settle(self) -> None:
        """Wait for what was started."""
        move, self._move = self._move, None
        if move is None:
            return
        del self._mover.moving[self]
        result = move.finish()
        if self.leaving:
            self.leaving = False
            self._check()
            self.away, self.here, self._given = result, None, None

    def bytes(self) -> Tensor:
        """Its bytes, here."""
        if self.leaving or self.here is None:
            self.enter()
        self.settle()
        self._check()
        if self._changed:
            raise BackendError(
                "offload: a tensor that backward needs was changed in place after it was saved; "
                "change a copy"
            )
        assert self.here is not None
        return self.here

    def _check(self) -> None:
        if self._given is not None:
            self._changed = self._changed or self._given._version != self._version


class Window:
    """The window of a chain, and what all calls of it share.

    Args:
        ahead: the number of modules in the window beside the current one.
    """

    def __init__(self, ahead: int) -> None:
        self.ahead = ahead
        self._mover: Mover | None = None  # made at the first call: copies of nets have their own
        self._pieces: weakref.WeakSet[Piece] = weakref.WeakSet()
        self._inside: list[weakref.ref[Piece]] = []
        self._calls = 0
        self._at: tuple[int, int] | None = None

    def __reduce__(self) -> Any:  # copies of a chain have a window of their own
        return Window, (self.ahead,)

    @property
    def bytes_here(self) -> int:
        """Bytes of saved tensors in the memory in which the program computes."""
        return sum(piece.size for piece in self._pieces if piece.here is not None)

    @property
    def bytes_away(self) -> int:
        """Bytes of saved tensors in the other memory."""
        return sum(piece.size for piece in self._pieces if piece.away is not None)

    def call(self, chain: Any) -> _Call:
        """A new forward."""
        if self._mover is None:
            self._mover = Mover(program_backend().arrays)
        self._calls += 1
        return _Call(self, self._calls, _storages(chain))

    def saved(self, x: Tensor, begin: int, end: int) -> Piece:
        """A new piece, inside."""
        assert self._mover is not None
        piece = Piece(self._mover, x, begin, end)
        self._pieces.add(piece)
        self._inside.append(weakref.ref(piece))
        return piece

    def move(self, at: tuple[int, int], pieces: Sequence[Piece]) -> None:
        """Move on: these pieces are inside from now on, the first ones needed first.

        Args:
            at: the number of the call and of the module, for which nothing is done again.
        """
        if at == self._at:
            return
        self._at = at
        wanted = dict.fromkeys(pieces)
        moving: Any = [] if self._mover is None else [*self._mover.moving]
        for piece in moving:  # one module's at a time are on their way out
            if piece.leaving or piece not in wanted:
                piece.settle()
        for ref in self._inside:
            if (left := ref()) is not None and left not in wanted:
                left.leave()
        for piece in wanted:
            if piece.here is None:
                piece.enter()
        self._inside = [weakref.ref(piece) for piece in wanted]


class Series:
    """Modules that their owner calls one after the other: those of ascending numbers are one
    forward of a chain."""

    def __init__(self, window: Window) -> None:
        self._window = window
        self._call: _Call | None = None
        self._last = -1

    def __reduce__(self) -> Any:  # copies are in no call
        return Series, (self._window,)

    def saving(self, number: int, module: Any) -> AbstractContextManager[None]:
        """Context in which the module of this number computes."""
        if self._call is None or number <= self._last:
            self._call = self._window.call(module)
        else:
            self._call.stay |= _storages(module)
        self._last = number
        return self._call.saving(self._call.count)


def _storages(module: Any) -> set[int]:
    """Storages of a module's parameters and buffers."""
    state = [*module.parameters(), *module.buffers()]
    return {x.untyped_storage()._cdata for x in state}


class _Saved(NamedTuple):
    """Placeholder that torch's graph keeps for a tensor in a piece."""

    piece: Piece
    call: _Call
    module: int
    dtype: Any
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        self.call.needs(self.module)
        memory = self.piece.bytes().view(self.dtype)
        # Before it has left, the piece is in the tensor's own storage.
        offset = memory.storage_offset() + self.offset
        return memory.as_strided(self.size, self.stride, offset)


class _Call:
    """A forward of a chain: the pieces that each of its modules has saved.

    Args:
        number: its own, among those of the window.
        stay: storages of parameters and buffers.
    """

    def __init__(self, window: Window, number: int, stay: set[int]) -> None:
        self._window, self._number, self.stay = window, number, stay
        self._modules: list[list[weakref.ref[Piece]]] = []
        self._known: dict[Any, tuple[StorageWeakRef, weakref.ref[Piece]]] = {}

    @property
    def count(self) -> int:
        """Modules that have computed, or compute."""
        return len(self._modules)

    @contextmanager
    def saving(self, module: int) -> Iterator[None]:
        """Context in which the module of this number computes."""
        self._modules.append([])
        first = max(0, module - self._window.ahead)
        self._window.move((self._number, ~module), self._pieces(range(first, module)))
        with saved_tensors_hooks(partial(self._packed, module), _unpacked):
            yield

    def needs(self, module: int) -> None:
        """The backward of a module has begun, or goes on."""
        last = max(-1, module - self._window.ahead - 1)
        self._window.move((self._number, module), self._pieces(range(module, last, -1)))

    def _pieces(self, modules: range) -> list[Piece]:
        found = (ref() for k in modules for ref in self._modules[k])
        return [piece for piece in found if piece is not None]

    def _packed(self, module: int, x: Tensor) -> Any:
        memory = x.untyped_storage() if x.layout is torch.strided else None
        if memory is None or memory._cdata in self.stay or not x.numel() or not _plain(x):
            return x
        begin, end = _extent(x)
        if 2 * (end - begin) > memory.nbytes():
            # Other tensors in it are likely saved, too, such as the parts of one projection.
            begin, end = 0, memory.nbytes()
        key = memory._cdata, x._version, begin, end
        piece = self._known[key][1]() if key in self._known else None
        if piece is None:
            piece = self._window.saved(x, begin, end)
            # While this reference lives, no other storage has the address.
            self._known[key] = StorageWeakRef(memory), weakref.ref(piece)
        self._modules[module].append(weakref.ref(piece))
        offset = int(x.storage_offset()) - begin // x.element_size()
        return _Saved(piece, self, module, x.dtype, tuple(x.shape), x.stride(), offset)


def _unpacked(saved: Any) -> Tensor:
    return saved.tensor() if isinstance(saved, _Saved) else saved


def _plain(x: Tensor) -> bool:
    """True for a tensor that its storage, dtype and strides describe; also for one without values,
    whose bytes `linop.strategies.estimate` asks for, and not one of a graph that torch makes."""
    kind = type(x)
    if kind is FakeTensor:
        known = not torch.compiler.is_compiling()
    else:
        known = kind is torch.Tensor or kind is torch.nn.Parameter
    return known and not x.is_conj() and not x.is_neg()


def _extent(x: Tensor) -> tuple[int, int]:
    """First and last byte of a tensor in its storage."""
    last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    begin = int(x.storage_offset())
    return begin * x.element_size(), (begin + last + 1) * x.element_size()
