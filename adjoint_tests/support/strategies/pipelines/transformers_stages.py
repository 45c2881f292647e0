"""Models of `transformers` in pipelines, beside one process: contracts for threads and ranks."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from linop.backends.engine.base import Backend
from linop.schedules import GENERATORS
from linop.strategies import Pipeline, split
from support.models.exact import in_double
from support.models.model import Batch
from support.models.zoo import ZOO

Tensor = Any
ROWS = 2
"""Of a micro-batch: torch exports for one number of rows."""
CUTS: dict[str, tuple[str, ...]] = {
    "GPT-2": ("transformer.h.1", "transformer.h.2", "lm_head"),
    "Llama": ("model.layers.1", "model.layers.2", "model.norm"),
    "Qwen3": ("model.layers.1", "model.layers.2", "lm_head"),
    "BERT": ("bert.encoder.layer.1", "bert.encoder.layer.2", "cls"),
    "ViT": ("vit.layers.1", "vit.layers.2", "classifier"),
    "T5": ("decoder", "decoder.block.1", "decoder.block.2"),
    "Mixtral": ("model.layers.1", "model.layers.2", "lm_head"),
}
"""Places where models of four layers (T5 three) are cut into four stages."""


class Net(NamedTuple):
    """A model, its stages, and the micro-batches of its batch."""

    model: Any
    stages: list[Any]
    batch: Batch
    tied: list[list[str]]


def net(name: str, micro_batches: int = 4, use_cache: bool = False, stages: int = 4) -> Net:
    """A model in float64 throughout, with a mask of padding, and embeddings that are tied."""
    family = ZOO[f"transformers {name}"]
    layers = 3 if name in ("T5", "GPT-2") else 4
    configuration = {**family.usual, "layers": layers, "mask": True, "tied": True}
    draw = torch.Generator().manual_seed(1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = family.build(configuration).double()
    model.config.use_cache = use_cache
    if name == "Mixtral":  # in another order of sums than loops over the chosen experts
        model.config._experts_implementation = "batched_mm"
    batch = family.inputs(configuration, ROWS * micro_batches, draw)
    one = batch.rows(0, ROWS)
    with in_double(model):
        made = split(model, CUTS[name][: stages - 1], one.arguments, **one.options)
    names: dict[int, list[str]] = {}
    for key, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(key)
    return Net(model, made, batch, [keys for keys in names.values() if len(keys) > 1])


def loss(output: Any, target: Tensor) -> Tensor:
    """Of the first output."""
    logits = output[0] if isinstance(output, tuple) else getattr(output, "logits", output)
    picked = logits.gather(-1, target.clamp(0).unsqueeze(-1)).sin().sum()
    return picked + logits.square().sum() / 7


def gradients(one: Net) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of one process, which adds those of the same micro-batches."""
    model, total = one.model, 0.0
    model.zero_grad()
    with in_double(model):
        for m in range(0, len(one.batch), ROWS):
            rows = one.batch.rows(m, m + ROWS)
            value = loss(model(*rows.arguments, **rows.options, use_cache=False), rows.target)
            value.backward()
            total = total + value.detach()
    every = model.named_parameters(remove_duplicate=False)
    return total, {name: p.grad for name, p in every if p.grad is not None}


def is_one_process(
    backend: Backend,
    one: Net,
    wanted: tuple[Tensor, dict[str, Tensor]],
    schedules: Sequence[tuple[str, int]],
) -> None:
    """Losses and gradients to 1e-12 under schedules of so many chunks."""
    for schedule, chunks in schedules:
        options: Any = {"chunks": chunks} if chunks > 1 else {}
        table = GENERATORS[schedule](len(one.stages), len(one.batch) // ROWS, **options)
        if (backend.worker or 0) >= len(table.workers):
            continue
        stages = copy.deepcopy(one.stages)
        pipe = Pipeline(
            stages,
            table,
            loss,
            edges=one.stages.edges,  # type: ignore[attr-defined]
            tied=one.tied,
            backend=backend,
        )
        pipe.zero_grad()
        value = pipe.step(one.batch.arguments, one.batch.target, **one.batch.options)
        if value is not None:
            assert abs(value - wanted[0]) <= 1e-12 * abs(wanted[0]), schedule
        for stage in pipe.stages.values():
            for name, p in stage.named_parameters():
                grad = wanted[1].get(name)
                assert (grad is None) == (p.grad is None), f"{schedule}: gradient of {name}"
                if grad is not None:
                    error = (p.grad - grad).abs().max() / grad.abs().max().clamp(1.0)
                    assert error < 1e-12, f"{schedule}: gradient of {name}: {error:.1e}"


def made_on_ranks(backend: Backend, name: str, schedule: str) -> None:
    """Each rank exports the model, in two stages."""
    one = net(name, stages=2)
    is_one_process(backend, one, gradients(one), [(schedule, 1)])
