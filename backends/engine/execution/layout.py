"""Memory of a bound plan: the buffer of each region in each stage, and which of them are results.

A result has memory of its own, allocated by the run if all results are small, else lent from a
pool (`linop.backends.engine.arrays.lending`). Every other buffer is fixed, and used by all runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from copy import copy

import numpy as np

from linop.backends.engine.arrays.interface import Arrays
from linop.backends.engine.execution.stage import Stage, buffer_of
from linop.backends.engine.execution.views import Buffer
from linop.planning.plan import LoweredPlan, Receive, Send
from linop.spaces.region import Region
from linop.spaces.scalars import Array


class Layout:
    """Buffers of a plan.

    Args:
        plan: after all passes (`linop.planning.passes`).

    Attributes:
        inputs: buffers of the arguments.
        results: buffers of the results, in the order of the plan's outputs.
        makes_results: True if a result is made by movements, and not by a local map.
        small: True if the run allocates these.
        open: results whose buffer differs from run to run, each with its index.
    """

    def __init__(self, plan: LoweredPlan, arrays: Arrays) -> None:
        self.plan = plan
        self.arrays = arrays
        self.inputs = tuple(buffer_of(region, arrays) for region in plan.inputs)
        self.stages: list[Stage] = []
        current = {r.name: buffer for r, buffer in zip(plan.inputs, self.inputs, strict=True)}
        for steps in plan.stages:
            stage = Stage(plan.worker, steps, current, arrays)
            for name in stage.current:
                del current[name]
            current |= stage.new
            self.stages.append(stage)
        self.results = tuple(current[region.name] for region in plan.outputs)
        made = {buffer: make.region for stage in self.stages for make, buffer in stage.made}
        self._own = {buffer: made[buffer] for buffer in self.results if buffer in made}
        self.makes_results = bool(self._own)
        size = sum(self.bytes_of(region.size) for region in self._own.values())
        self.small = size <= arrays.small and not any(buffer.on_host for buffer in self._own)
        self.open: dict[Buffer, int] = {}

    @property
    def dtype(self) -> np.dtype:
        return self.plan.dtype

    def bytes_of(self, size: int) -> int:
        """Bytes of a number of elements."""
        return int(size) * self.dtype.itemsize

    def arrays_of(self, buffer: Buffer) -> Arrays:
        """Array module of a buffer."""
        return self.arrays.of("host") if buffer.on_host else self.arrays

    def place(self, memory: Callable[[Region], Array], small_stay: bool = False) -> None:
        """Give every region made its memory, except for results, which get it at every run.

        Args:
            memory: allocates fixed memory of a region.
            small_stay: True if small results are computed in fixed memory, and copied from it.
        """
        for k, stage in enumerate(self.stages):
            for make, buffer in stage.made:
                if make.within is not None:
                    buffer.within = self.stages[k + 1].view(make.within)
                elif buffer not in self._own or (self.small and small_stay):
                    buffer.array = memory(make.region)
        made = [buffer for buffer in self._own if buffer.array is None]
        self.open.update((buffer, k) for k, buffer in enumerate(made))

    def part(self, peers: Collection[int]) -> Layout:
        """The same memory, with the messages of some peers only."""
        part = copy(self)
        part.stages = [stage.part(peers) for stage in self.stages]
        return part

    @property
    def messages(self) -> list[Send | Receive]:
        """Sends and receives of all stages, in order."""
        every: list[Send | Receive] = []
        for stage in self.stages:
            every += [*stage.sends, *stage.receives]
        return every

    def zeros(self, region: Region) -> Array:
        """Zeros in ordinary memory, as `place` wants them."""
        return self.arrays.of(region.memory).zeros(region.shape, self.dtype)
