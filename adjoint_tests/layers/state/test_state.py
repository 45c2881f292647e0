"""States of distributed models are the sequential ones, bit for bit, wherever they are saved and by
however many workers they are loaded."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

import torch
import torch.distributed.checkpoint as dcp

from linop import LinopError, launch, layers
from linop.errors import ArgumentError
from support.layers.state import (
    MISTAKES,
    Held,
    adam,
    both_are_torchs,
    equal,
    keeps_its_state,
    loads,
    network,
    pairs,
    resumes,
    same_optimizer,
    saves,
    scatters_and_gathers,
    sequential,
    trained,
    trains_and_saves,
)
from support.requirements import needs_mpi
from support.workers import on_ranks


@given(pairs(6))
def test_states_are_exact_on_threads(pair: tuple[Held, Held]) -> None:
    held, _ = pair
    launch(lambda backend: scatters_and_gathers(backend, held), held.workers)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@given(pairs(6))
def test_saved_states_are_exact_on_threads(pair: tuple[Held, Held]) -> None:
    first, second = pair
    with tempfile.TemporaryDirectory() as folder:
        launch(lambda backend: saves(backend, first, folder), first.workers)
        launch(lambda backend: loads(backend, second, folder), second.workers)
        both_are_torchs(first, folder)


@needs_mpi
@pytest.mark.timeout(300)
@settings(max_examples=5)
@given(pairs(4))
def test_states_are_exact_on_ranks(pair: tuple[Held, Held]) -> None:
    first, second = pair
    on_ranks(first.workers, scatters_and_gathers, first)
    with tempfile.TemporaryDirectory() as folder:
        on_ranks(first.workers, saves, first, folder)
        on_ranks(second.workers, loads, second, folder)


def test_training_resumes_on_threads(tmp_path: Path) -> None:
    # One worker more than the network needs: it has no parameters.
    launch(lambda backend: trains_and_saves(backend, 2, str(tmp_path)), 3)
    launch(lambda backend: resumes(backend, 3, str(tmp_path)), 3)
    launch(lambda backend: resumes(backend, 1, str(tmp_path)), 2)


@pytest.mark.parametrize("workers", [1, 2])
def test_an_optimizers_state_is_a_copy(workers: int) -> None:
    launch(keeps_its_state, workers)


@needs_mpi
@pytest.mark.timeout(300)
def test_training_resumes_on_ranks(tmp_path: Path) -> None:
    on_ranks(2, trains_and_saves, 2, str(tmp_path))
    on_ranks(3, resumes, 3, str(tmp_path))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_sequential_twin_resumes_what_workers_saved(tmp_path: Path) -> None:
    launch(lambda backend: trains_and_saves(backend, 2, str(tmp_path)), 2)
    twin = sequential()
    optimizer = adam(twin)
    saved = torch.load(tmp_path / "file")
    twin.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    trained(twin, optimizer, range(2, 5), lambda whole: whole)
    end = torch.load(tmp_path / "end")
    for key, whole in twin.state_dict().items():
        assert (whole - end["model"][key]).abs().max() < 1e-11
    same_optimizer(optimizer.state_dict(), end["optimizer"], 1e-9)
    # And torch's own reader finds the state in what each worker wrote alone.
    empty = {"model": sequential().state_dict()}
    dcp.load(empty, checkpoint_id=tmp_path / "parts", no_dist=True)
    equal(empty["model"], saved["model"])


@pytest.mark.parametrize(("words", "call"), MISTAKES, ids=[words for words, _ in MISTAKES])
def test_a_mistake_is_the_same_error_on_every_worker(words: str, call: Any) -> None:
    def main(backend: Any) -> str:
        with pytest.raises(LinopError) as caught:
            call(network(2), backend.worker)
        return str(caught.value)

    said = launch(main, 2)
    assert words in said[0]
    assert said[0] == said[1]


@pytest.mark.parametrize("sharded", [False, True])
def test_what_was_saved_of_another_model_is_refused(tmp_path: Path, sharded: bool) -> None:
    def main(backend: Any) -> list[str]:
        model, said = network(2), []
        layers.save(model, tmp_path / "x", sharded=sharded)
        layers.load(model, tmp_path / "x")
        other = torch.nn.Sequential(model[0])
        for call in (
            lambda: layers.load(other, tmp_path / "x"),
            lambda: layers.load(model, tmp_path / "x", adam(model)),
        ):
            with pytest.raises(LinopError) as caught:
                call()
            said.append(str(caught.value))
        return said

    first, second = launch(main, 2)
    assert first == second
    assert "unexpected ['2.weight', '2.bias']" in first[0]
    assert "no state of an optimizer" in first[1]


def test_what_is_no_module_is_refused_with_its_own_methods() -> None:
    class Pipeline:
        """Has methods for its state."""

    for function in (layers.gather_state, lambda one: layers.save(one, "never.pt")):
        with pytest.raises(ArgumentError, match="given Pipeline; a Pipeline has methods for"):
            launch(lambda backend, function=function: function(Pipeline()), 2)
