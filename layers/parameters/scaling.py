"""Gradient scaler for mixed precision that skips a step on all workers or on none."""

from __future__ import annotations

from typing import Any

import torch

from linop.layers.agreement.input_agreement import agreement_of, program_backend


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for distributed models: an infinite gradient on one worker is one on
    all, so that all skip the step, and back off, together. Collective: `step` and `unscale_`.

    Args:
        device: by default that of the program's tensors.
        kwargs: as in torch.

    Example:
        >>> def main(backend):
        ...     w = torch.nn.Parameter(torch.ones(1))
        ...     scaler, optimizer = layers.GradScaler(), torch.optim.SGD([w], lr=1.0)
        ...     loss = w.sum() * (torch.inf if backend.worker == 0 else 1.0)
        ...     scaler.scale(loss).backward()
        ...     scaler.step(optimizer)
        ...     return w.item()
        >>> linop.launch(main, workers=2)  # worker 1 does not step, either
        [1.0, 1.0]
    """

    def __init__(self, device: str | None = None, **kwargs: Any) -> None:
        super().__init__(program_backend().arrays.device if device is None else device, **kwargs)

    def _check_scale_growth_tracker(self, *args: Any) -> tuple[Any, Any]:
        if self._scale is None:  # this worker has no loss, which others have scaled
            self._lazy_init_scale_growth_tracker(torch.device(self._device))
        found: tuple[Any, Any] = super()._check_scale_growth_tracker(*args)
        return found

    def _unscale_grads_(self, optimizer: Any, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        given = getattr(optimizer, "whole", optimizer)  # a ShardedOptimizer's parameters
        found: dict[Any, Any] = super()._unscale_grads_(given, *args, **kwargs)
        if not found:  # by a worker without gradients, which torch takes for a mistake
            assert self._scale is not None
            found[self._scale.device] = torch.zeros((), device=self._scale.device)
        infinite = sum(int(flag) for flag in found.values())
        if agreement_of(program_backend()).sum(infinite, "unscale gradients"):
            for flag in found.values():
                flag.fill_(1.0)
        return found
