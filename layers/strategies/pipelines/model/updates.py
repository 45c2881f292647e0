"""Updates of a worker's stages in a step, by one optimizer for all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from linop.strategies.pipelines.model.gradient_norm import GradientNorm
from linop.strategies.pipelines.model.tied_weights import TiedWeights
from linop.strategies.pipelines.stages.stage import Stage


class Updates:
    """Updates of this worker's stages.

    Args:
        stages: by index.
        tied: gradients that are added before the first update of a step; None if there are none.
        norm: gradients are clipped then; None if they are not.
        max_norm: the norm that they are clipped to.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        tied: TiedWeights | None,
        norm: GradientNorm | None,
        max_norm: float | None,
    ) -> None:
        self._stages = stages
        self._optimizer: Any = None
        self._tied, self._norm, self._max_norm = tied, norm, max_norm
        self._is_first = True

    def begin(self, optimizer: Any) -> None:
        """Begin a step.

        Args:
            optimizer: of the parameters of all stages; None: gradients stay.
        """
        self._is_first, self._optimizer = True, optimizer
        if self._tied is not None:
            self._tied.begin()

    def update(self, stage: Stage) -> None:
        """Apply the gradients of a stage, and forget them. Collective, the first of a step."""
        if self._is_first and self._tied is not None:
            self._tied.add()
        if self._is_first and self._norm is not None and self._max_norm is not None:
            self._norm.clip(self._max_norm)
        self._is_first = False
        if self._optimizer is not None:
            stage.renew()
            with self._alone(stage):
                self._optimizer.step()
            for p in stage.parameters:
                p.grad = None
        stage.renewed()

    @contextmanager
    def _alone(self, stage: Stage) -> Iterator[None]:
        """Context in which parameters of other stages have no gradients, so that the optimizer
        leaves them."""
        own = {id(p) for p in stage.parameters}
        others = [
            (p, p.grad)
            for other in self._stages.values()
            for p in other.parameters
            if p.grad is not None and id(p) not in own
        ]
        for p, _ in others:
            p.grad = None
        try:
            yield
        finally:
            for p, grad in others:
                p.grad = grad
