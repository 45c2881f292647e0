"""The language model of examples/ in pipelines, beside one process."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import linop
from linop.backends import Backend
from support.examples import example

UPDATES, BATCH, MICRO_BATCHES = 2, 4, 4


@pytest.mark.parametrize("name, workers", [("gpipe", 2), ("1f1b", 4), ("interleaved-1f1b", 2)])
def test_losses_are_those_of_one_process(name: str, workers: int) -> None:
    model = example("language_model")
    net = model.blocks()

    def program(backend: Backend) -> list[float]:
        losses = list(model.in_pipeline(backend, net, name, BATCH, UPDATES, MICRO_BATCHES))
        return [] if losses[0] is None else [loss.item() for loss in losses]

    found = linop.launch(program, workers)[-1]
    alone = model.alone(model.blocks(), BATCH, UPDATES, MICRO_BATCHES)
    assert found == [loss.item() for loss in alone]
