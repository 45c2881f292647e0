"""Movement of tensors to another kind of memory and back, by an operator and its adjoint.

O = `linop.offload` moves the bytes of a tensor out of the memory in which the program computes, and
O.H, which is derived, brings them back. On a device both are queued on a stream of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from linop.backends import BoundPlan, threads
from linop.backends.arrays.interface import Arrays
from linop.backends.autograd.ports import Port
from linop.backends.device.device_arrays import DeviceArrays
from linop.operators.offloading import offload
from linop.spaces.region import Region
from linop.spaces.space import Space

Tensor = Any
"""torch is not typed here."""


class Mover:
    """Plans of O for tensors of bytes, by size. They are this worker's alone.

    Args:
        arrays: of the tensors that are moved.
    """

    def __init__(self, arrays: Arrays) -> None:
        self._backend = threads.alone(arrays)
        self._free: dict[int, list[BoundPlan]] = {}
        self.moving: dict[Any, None] = {}
        """Owners of runs that have not ended: they live until then, whoever forgets them."""
        self.stream = Aside(arrays)
        self.asynchronous = arrays.asynchronous

    def out(self, here: Tensor) -> Move:
        """Start O of a contiguous tensor of bytes, which must not change before the end."""
        return Move(self, self._plan(here.numel()), here)

    def back(self, away: Tensor, here: Tensor) -> Move:
        """Start O.H of what O gave, into a tensor, which must not be used before the end."""
        return Move(self, self._plan(here.numel()).H, away, here)

    def _plan(self, size: int) -> BoundPlan:
        """A plan of O that no run uses: one run at a time is a plan's rule."""
        free = self._free.setdefault(size, [])
        if free:
            return free.pop()
        plan: BoundPlan = offload(Space([Region("saved", size)], "uint8")).compile(self._backend)
        return plan

    def release(self, plan: BoundPlan) -> None:
        """Take a plan of O, or of O.H, back."""
        is_out = plan.codomain.regions[0].memory == "host"
        self._free[plan.domain.size].append(plan if is_out else plan.H)


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

    @contextmanager
    def __call__(self) -> Iterator[None]:
        if self._device is None:
            yield
            return
        with self._device.tensors.stream(torch):
            self.queue.wait_event(self._device.streams.mark())
        with self.queue:
            yield


class Move:
    """A run of O or O.H that has been started.

    Args:
        x: the argument. out: where the result is to be.
    """

    def __init__(self, mover: Mover, plan: BoundPlan, x: Tensor, out: Tensor | None = None) -> None:
        self._mover, self._plan = mover, plan
        self._x, self._out = x, out  # they live until the end
        ends = plan.domain, plan.codomain
        given, self._result = (Port(plan.backend, s.regions[0], torch.uint8) for s in ends)
        with mover.stream():
            plan.start(given.array(x), out=None if out is None else self._result.array(out))

    def finish(self) -> Tensor:
        """The result, after a wait of the host for its copy."""
        y = self._plan.finish()
        self._mover.release(self._plan)
        return self._result.tensor(y) if self._out is None else self._out
