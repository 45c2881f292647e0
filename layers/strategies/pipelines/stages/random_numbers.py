"""Random numbers of a stage's forwards, as dropout draws them: of each step, stage and micro-batch
their own.

torch's modules draw from one generator in the process, which workers that are threads share, in an
order that depends on the schedule. Here each forward that draws begins with a seed of its own, and
leaves the generator as it was; so masks are the same under any schedule, on threads and on ranks,
and in a forward that is computed again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from linop.layers.parameters.generator import from_seed, seed_of


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

    def begin(self) -> None:
        """Begin a step or an evaluation: the program may have changed a dropout's rate or mode."""
        self._draws.clear()

    def draws(self, training: bool) -> bool:
        """False if forwards in this mode need no seed."""
        return self._alone and self._draws.get(training, True)

    def of(self, training: bool, what: int | str) -> AbstractContextManager[None]:
        """Context of a forward.

        Args:
            training: mode of the module.
            what: the micro-batch, or what else is computed.
        """
        if not self.draws(training):
            return nullcontext()
        return self._seeded(training, f"{self.seed} {self.step} {self._stage} {what}")

    @contextmanager
    def _seeded(self, training: bool, text: str) -> Iterator[None]:
        with from_seed(seed_of(text)) as (state, turn):
            yield
        self._draws[training] = not torch.equal(state, turn.state)

    def probing(self, training: bool) -> AbstractContextManager[None]:
        """Context of a forward for its shapes."""
        if self._alone:
            return self._seeded(training, "probe")
        return torch.random.fork_rng(devices=[])
