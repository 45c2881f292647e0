"""Movement of tensors to another kind of memory and back, by an operator and its adjoint.

O = `linop.offload` moves the bytes of a tensor out of the memory in which the program computes, and
O.H, which is derived, brings them back. On a device both are queued on a stream of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from linop.backends import BoundPlan
from linop.backends.autograd.ports import Port
from linop.backends.device.device_arrays import DeviceArrays
from linop.backends.engine.arrays.interface import Arrays
from linop.backends.threads import backend as threads
from linop.operators.offloading import offload
from linop.spaces.region import Region
from linop.spaces.space import Space


class Mover:
    """Plans of O for tensors of bytes, by size. They are this worker's alone.

    Args:
        arrays: of the tensors that are moved.
    """

    def __init__(self, arrays: Arrays) -> None:
        self._backend = threads.alone(arrays)
        self._free: dict[int, list[_Way]] = {}
        self.moving: dict[Any, None] = {}
        """Owners of runs that have not ended: they live until then, whoever forgets them."""
        self.stream = Aside(arrays)
        self.asynchronous = arrays.asynchronous

    def out(self, here: Tensor) -> Move | NoMove:
        """Start O of a contiguous tensor of bytes, which must not change before the end."""
        if here.is_meta or isinstance(here, FakeTensor):
            return NoMove(torch.empty_like(here))
        return Move(self, self._way(here.numel()), here)

    def back(self, away: Tensor, here: Tensor) -> Move:
        """Start O.H of what O gave, into a tensor, which must not be used before the end."""
        return Move(self, self._way(here.numel()), away, here)

    def _way(self, size: int) -> _Way:
        """A plan of O that no run uses: one run at a time is a plan's rule."""
        free = self._free.setdefault(size, [])
        if free:
            return free.pop()
        plan = self._backend.compile(offload(Space([Region("saved", size)], "uint8")))
        ends = plan.domain, plan.codomain
        return _Way(plan, *(Port(self._backend, s.regions[0], torch.uint8) for s in ends))

    def release(self, way: _Way) -> None:
        """Take a plan back."""
        self._free[way.plan.domain.size].append(way)


class _Way(NamedTuple):
    """A plan of O, and the conversions of tensors at both ends."""

    plan: BoundPlan
    here: Port
    away: Port


class NoMove(NamedTuple):
    """A run of O of bytes without values, of which `linop.strategies.estimate` asks the number.

    Attributes:
        result: of `finish`.
    """

    result: Tensor

    def finish(self) -> Tensor:
        """The result."""
        return self.result


class Aside:
    """A stream of its own on a device, for copies while torch computes; nothing without one.

    Called, it is a context of that stream, which waits for what was queued on torch's so far: what
    leaves is computed there, and memory for what comes was used there.
    """

    def __init__(self, arrays: Arrays) -> None:
        self._device = arrays if isinstance(arrays, DeviceArrays) else None
        self.queue: Any = None
        if self._device is not None:
            self.queue = self._device.module.cuda.Stream(non_blocking=True)

    def __call__(self) -> AbstractContextManager[None]:
        return nullcontext() if self._device is None else self._entered(self._device)

    @contextmanager
    def _entered(self, device: DeviceArrays) -> Iterator[None]:
        with device.tensors.stream(torch):
            self.queue.wait_event(device.streams.mark())
        with self.queue:
            yield


class Move:
    """A run of O, or of O.H, that has been started; it is over if nothing runs asynchronously.

    Args:
        x: the argument.
        out: where the result of O.H is to be; None: it is a run of O.
    """

    def __init__(self, mover: Mover, way: _Way, x: Tensor, out: Tensor | None = None) -> None:
        self._mover, self._way = mover, way
        self._x, self._out = x, out  # they live until the end
        if out is None:
            self._plan, given, made = way.plan, way.here.array(x), None
        else:
            self._plan, given, made = way.plan.H, way.away.array(x), way.here.array(out)
        self._result: Any = None
        with mover.stream():
            if mover.asynchronous:
                self._plan.start(given, out=made)
            else:  # without the steps of a run that stops and goes on
                self._result = self._plan(given, out=made)

    def finish(self) -> Tensor:
        """The result, after a wait of the host for its copy."""
        y = self._plan.finish() if self._mover.asynchronous else self._result
        self._mover.release(self._way)
        return self._way.away.tensor(y) if self._out is None else self._out
