"""Random numbers of a stage's forwards, as dropout draws them: of each step, stage and micro-batch
their own.

torch's modules draw from one generator in the process, which workers that are threads share, in an
order that depends on the schedule. Here each forward that draws begins with a seed of its own, and
leaves the generator as it was; so masks are the same under any schedule, on threads and on ranks,
and in a forward that is computed again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch

from linop.layers.parameters.generator import Seeded, seed_of

Result = TypeVar("Result")


class RandomNumbers:
    """Seeds of one stage.

    Args:
        stage: its index.
        alone: False for a stage on several workers, whose forwards wait for each other: they draw
            from the generator as it is.

    Attributes:
        seed: of the pipeline, the same on all workers.
        step: number of the step.
    """

    def __init__(self, stage: int, alone: bool) -> None:
        self.seed = self.step = 0
        self._stage, self._alone = stage, alone
        self._draws: dict[bool, bool] = {}
        """True if forwards draw, in training mode or not, as found in the first one of a run."""
        self._quiet: dict[bool, bool] = {}
        """True if they did not, when the first one of a run last had a seed."""

    def begin(self) -> None:
        """Begin a step or an evaluation: the program may have changed a dropout's rate or mode."""
        self._draws.clear()

    def draws(self, training: bool) -> bool:
        """False if forwards in this mode need no seed."""
        return self._alone and self._draws.get(training, True)

    def run(
        self, training: bool, what: int | str, forward: Callable[[], Result], pure: bool
    ) -> Result:
        """Result of a forward.

        Args:
            training: mode of the module.
            what: the micro-batch, or what else is computed.
            pure: True if a forward may run twice, with one effect.
        """
        if not self.draws(training):
            return forward()
        if pure and self._quiet.get(training) and training not in self._draws:
            # To watch the generator is less than half of the time of a seed.
            with Seeded(None) as turn:
                result = forward()
            if not turn.drew:
                self._draws[training] = False
                return result
        with Seeded(seed_of(f"{self.seed} {self.step} {self._stage} {what}")) as turn:
            result = forward()
        self._draws[training] = turn.drew
        self._quiet[training] = not turn.drew
        return result

    def probing(self) -> AbstractContextManager[Any]:
        """Context of a forward for its shapes."""
        return Seeded(seed_of("probe")) if self._alone else torch.random.fork_rng(devices=[])
