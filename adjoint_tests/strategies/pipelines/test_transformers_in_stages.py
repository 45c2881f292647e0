"""Models of `transformers` in pipelines: keyword inputs, masks, rotary embeddings, encoders and
decoders are those of one process, under every schedule."""

from __future__ import annotations

import pytest

from support.models.packages import missing

if why := missing():
    pytest.skip(f"models of other people are {why}", allow_module_level=True)

from support.requirements import needs_mpi
from support.strategies.pipelines.transformers_stages import (
    CUTS,
    gradients,
    is_one_process,
    made_on_ranks,
    net,
)
from support.workers import on_ranks, on_threads

OF_FOUR = [("gpipe", 1), ("1f1b", 1), ("zb-h1", 1), ("backward-first", 1)]
FEW = {"GPT-2": [0], "Qwen3": [3], "BERT": [1], "ViT": [2], "Mixtral": [1], "T5": [2]}
"""Schedules of models beside those that have all of them."""


@pytest.mark.parametrize("name", CUTS)
def test_models_on_threads(name: str) -> None:
    one = net(name)
    wanted = gradients(one)
    few = FEW.get(name, range(4))
    on_threads(4, is_one_process, one, wanted, [OF_FOUR[k] for k in few])
    if name in ("Llama", "T5"):
        on_threads(2, is_one_process, one, wanted, [("interleaved-1f1b", 2)])


@needs_mpi
def test_a_model_on_ranks() -> None:
    on_ranks(2, made_on_ranks, "Llama", "1f1b")


def test_caches_are_left_out_of_stages() -> None:
    one = net("Llama", micro_batches=2, use_cache=True)
    assert one.model.config.use_cache is True
    on_threads(4, is_one_process, one, gradients(one), [("1f1b", 1)])
