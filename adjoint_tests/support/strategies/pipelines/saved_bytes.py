"""Bytes that pipelines keep, counted in tensors that autograd saves."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from linop.backends.engine.base import Backend
from linop.schedules import Sizes, simulate
from support.strategies.pipelines.pipelines import Case, squares

Tensor = Any


def counted_and_predicted(backend: Backend, case: Case) -> tuple[int, float]:
    """The largest number of bytes that autograd saves on this worker in a step; and the prediction
    from what a forward of each of its stages saves."""
    stages = case.model()
    x, target = case.batch()
    pipe = case.pipeline(backend, stages)
    rows = case.sizes[0]
    # Views of the user's batch, and the parameters, are not the pipeline's.
    others = {p.untyped_storage().data_ptr() for p in (x, target, *pipe.parameters())}
    each = [0] * case.stages
    for s, stage in pipe.stages.items():
        saved = Saved(others)
        with saved.hooks():
            y = stage(x[:rows].clone().requires_grad_() if s else x[:rows])
            loss = squares(y, target[:rows]) if s == case.stages - 1 else y
        each[s] = saved.peak
        del y, loss
        assert saved.live == 0
    everything = Saved(others)
    with everything.hooks():
        pipe.step(x, target)
    assert everything.live == 0
    predicted = simulate(case.table).peak_bytes(Sizes(each))
    return everything.peak, predicted[backend.worker or 0]


def keeps_what_is_predicted(backend: Backend, case: Case) -> None:
    """Bytes counted are bytes predicted: those of one micro-batch, times the micro-batches in
    flight."""
    counted, predicted = counted_and_predicted(backend, case)
    assert counted == predicted, (counted, predicted)


def forgets_outputs(backend: Backend, case: Case) -> None:
    """An output that was sent is memory that others may have, though its backward is to come: a
    layer whose backward does not read its output keeps one at a time."""
    outputs: list[Any] = []
    in_step = False

    class Watched(torch.nn.Linear):  # type: ignore[misc]  # torch is not typed here
        def forward(self, x: Tensor) -> Tensor:
            assert not in_step or not [one for one in outputs if one() is not None]
            y = super().forward(x)
            outputs.append(weakref.ref(y))
            return y

    stages = [Watched(case.width, case.width).double(), *case.model()[1:]]
    pipe = case.pipeline(backend, stages)
    x, target = case.batch()
    pipe.step(x, target)
    outputs.clear()
    in_step = True
    pipe.step(x, target)


class Saved:
    """Bytes of the tensors that autograd saves, each storage once, but for some."""

    def __init__(self, but: set[int]) -> None:
        self._but = but
        self._held: dict[int, int] = {}
        self.live = self.peak = 0

    def hooks(self) -> Any:
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda kept: kept.tensor)

    def _pack(self, tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()
        at, size = storage.data_ptr(), storage.nbytes()
        kept = _Kept(tensor)
        if at not in self._but:
            self._held[at] = self._held.get(at, 0) + 1
            self.live += size if self._held[at] == 1 else 0
            self.peak = max(self.peak, self.live)
            weakref.finalize(kept, self._gone, at, size)
        return kept

    def _gone(self, at: int, size: int) -> None:
        self._held[at] -= 1
        self.live -= size if self._held[at] == 0 else 0


class _Kept:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # else the graph of an output that is saved would hold itself
