"""A checkpoint is loaded exactly, into any model, or refused with nothing changed."""

from __future__ import annotations

import importlib.util
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

import torch

from linop import LinopError, Partition, launch, layers
from support.layers import checkpoints as checks
from support.layers.checkpoints import (
    adam,
    files_of,
    filled,
    linear,
    loads_or_refuses,
    save_value,
    torch_alone,
    value_in,
    value_of,
)
from support.layers.state import same_optimizer
from support.requirements import needs_mpi
from support.workers import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
EITHER = pytest.mark.parametrize("sharded", [False, True], ids=["file", "folder"])

# Damaged


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of the value 3: with an optimizer, in all forms."""
    folder = tmp_path_factory.mktemp("saved")

    def main(_: Any) -> None:
        model = filled(3)
        optimizer = adam(model, 0.25)
        checks.filled_again(model, 3)
        layers.save(model, folder / "file", optimizer)
        layers.save(model, folder / "folder", optimizer, sharded=True)

    launch(main, 2)
    torch.save(torch.load(folder / "file"), folder / "torchs")
    return folder


@settings(max_examples=3 * settings().max_examples)
@given(st.data())
@EITHER
def test_damage_is_found_before_anything_is_changed(
    saved: Path, sharded: bool, data: st.DataObject
) -> None:
    name = "folder" if sharded else data.draw(st.sampled_from(["file", "torchs"]))
    path = Path(tempfile.mkdtemp(dir=saved)) / name
    (shutil.copytree if sharded else shutil.copy)(saved / name, path)
    file = data.draw(st.sampled_from(files_of(path)))
    whole = bytearray(file.read_bytes())
    start = data.draw(st.integers(0, len(whole) - 1))
    kind = data.draw(st.sampled_from(["flip", "zeros", "cut"]))
    if kind == "flip":
        whole[start] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "zeros":
        whole[start : start + 4096] = bytes(len(whole[start : start + 4096]))
    else:
        del whole[start:]
    file.write_bytes(whole)
    # One error for both and nothing changed; or, as of a file's padding, or seal, all exactly.
    said = loads_or_refuses(path, 3, optimizer=True)
    if sharded:
        assert bool(said) == (whole != (saved / name / file.name).read_bytes())
    elif kind == "cut":
        assert said or b"PK\5\6" in whole
    shutil.rmtree(path.parent)


@EITHER
def test_every_bit_of_a_weight_is_checked(tmp_path: Path, sharded: bool) -> None:
    save_value(tmp_path / "x", 3, sharded)
    weight = torch.full((2,), 3.0, dtype=torch.float64).numpy().tobytes()
    found = 0
    for file in files_of(tmp_path / "x"):
        whole = file.read_bytes()
        for at in (m.start() for m in re.finditer(re.escape(weight), whole)):
            file.write_bytes(whole[:at] + b"\1" + whole[at + 1 :])
            assert "is damaged, and nothing was loaded" in loads_or_refuses(tmp_path / "x", 3)
            file.write_bytes(whole)
            found += 1
    assert found >= 2
    assert loads_or_refuses(tmp_path / "x", 3) == ""


def test_a_folder_without_a_block_changes_nothing(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "folder", tmp_path / "x")
    last = files_of(tmp_path / "x")[-1]
    last.unlink()
    assert f"there is no file {last.name!r}" in loads_or_refuses(tmp_path / "x", 3, True)


def test_a_state_that_does_not_fit_changes_nothing(saved: Path, tmp_path: Path) -> None:
    # The model's part of it does; the optimizer's, which comes later, does not.
    whole = torch.load(saved / "file")
    whole["optimizer"]["state"][0]["exp_avg"] = torch.zeros(3)
    torch.save(whole, tmp_path / "x")
    assert "exp_avg' has shape (3,)" in loads_or_refuses(tmp_path / "x", 3, True)


def test_a_folder_without_digests_loads_with_a_warning(tmp_path: Path) -> None:
    torch_alone(tmp_path / "x")
    with pytest.warns(UserWarning, match="has no digests"):
        assert loads_or_refuses(tmp_path / "x", 3) == ""
    # What torch writes with each tensor is a CRC.
    file = next((tmp_path / "x").glob("*.distcp"))
    whole = file.read_bytes()
    at = whole.index(torch.full((2,), 3.0, dtype=torch.float64).numpy().tobytes())
    file.write_bytes(whole[:at] + b"\1" + whole[at + 1 :])
    with pytest.warns(UserWarning, match="has no digests"):
        assert "CRC" in loads_or_refuses(tmp_path / "x", 3)


def test_a_file_that_cannot_be_checked_loads_with_a_warning(tmp_path: Path) -> None:
    state = torch.nn.Linear(8, 2).double().state_dict()
    for tensor in state.values():
        tensor.fill_(3)
    torch.save(state, tmp_path / "x", _use_new_zipfile_serialization=False)
    with pytest.warns(UserWarning, match="neither digests nor CRCs"):
        assert loads_or_refuses(tmp_path / "x", 3) == ""
    torch.save(state, tmp_path / "y")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert loads_or_refuses(tmp_path / "y", 3) == ""


@needs_mpi
@pytest.mark.timeout(300)
def test_ranks_refuse_what_is_damaged(saved: Path, tmp_path: Path) -> None:
    for name in ("file", "folder"):
        path = tmp_path / name
        (shutil.copytree if name == "folder" else shutil.copy)(saved / name, path)
        first = files_of(path)[0]
        whole = first.read_bytes()
        first.write_bytes(whole[:500] + bytes([whole[500] ^ 1]) + whole[501:])
        on_ranks(3, checks.refuses, str(path), "is damaged, and nothing was loaded")
        on_ranks(3, checks.has, str(saved / name), 3.0)


def test_an_option_that_could_not_be_loaded_is_not_saved(tmp_path: Path) -> None:
    def main(_: Any) -> str:
        model = filled(1)
        optimizer = adam(model, 0.5)
        optimizer.param_groups[0]["mine"] = Path("x")
        with pytest.raises(LinopError) as caught:
            layers.save(model, tmp_path / "x", optimizer)
        return str(caught.value)

    first, second = launch(main, 2)
    assert first == second
    assert "option 'mine' is of type pathlib" in first


def test_a_folder_holds_one_checkpoint(tmp_path: Path) -> None:
    torch_alone(tmp_path / "x")
    (tmp_path / "x" / "notes").write_text("mine")
    for value in (1, 2):
        save_value(tmp_path / "x", value, sharded=True)
        assert value_in(tmp_path / "x") == value
    names = sorted(file.name for file in files_of(tmp_path / "x"))
    assert names[0] == ".metadata"
    assert names[-1] == "notes"
    assert len(names) == 4


# Models without memory


def _on_meta(made: Callable[[], Any]) -> Any:
    with torch.device("meta"):
        return made()


@EITHER
@pytest.mark.parametrize("optimizer", [False, True], ids=["model", "with optimizer"])
def test_a_model_on_the_meta_device_is_loaded(saved: Path, sharded: bool, optimizer: bool) -> None:
    def main(_: Any) -> Any:
        model = _on_meta(linear)
        model.weight.requires_grad_(False)
        tied = torch.nn.ModuleList([model, model])
        weight = model.weight
        given = torch.optim.Adam([{"params": list(model.parameters())}]) if optimizer else None
        layers.load(model, saved / ("folder" if sharded else "file"), given)
        assert tied[1].weight is weight
        assert (weight.device.type, weight.requires_grad) == ("cpu", False)
        assert isinstance(weight, torch.nn.Parameter)
        assert value_of(model) == 3
        return given and layers.gather_optimizer_state(model, given)

    def wanted(_: Any) -> Any:
        model = linear()
        given = adam(model, 1)
        layers.load(model, saved / "file", given)
        return layers.gather_optimizer_state(model, given)

    found = launch(main, 2)[0]
    if optimizer:
        same_optimizer(found, launch(wanted, 2)[0])


def _known(model: Any) -> Any:
    """The same values on all workers, where threads share torch's generator."""
    with torch.no_grad():
        for number, tensor in enumerate([*model.parameters(), *model.buffers()]):
            tensor.fill_(number)
    return model


def test_buffers_and_plain_modules_on_the_meta_device(tmp_path: Path) -> None:
    def network() -> Any:
        P = Partition((1, 2, 1, 1))
        return torch.nn.Sequential(layers.BatchNorm2d(P, 4), torch.nn.Linear(2, 3))

    def main(backend: Any) -> None:
        wanted = layers.gather_state(_known(network()))
        assert wanted is not None
        for state in (wanted, wanted if backend.worker else None):
            model = _on_meta(network)
            layers.scatter_state(model, state)
            found = layers.gather_state(model)
            assert found is not None
            assert all(torch.equal(found[key], wanted[key]) for key in wanted)
            assert all(not x.is_meta for x in [*model.parameters(), *model.buffers()])

    launch(main, 2)


def _with_a_lost_buffer() -> Any:
    model = linear()
    model.register_buffer("cache", torch.empty(2, device="meta"), persistent=False)
    return model


MISTAKES: list[tuple[str, Callable[[Any, Path], Any]]] = [
    (
        "gather_state: ['weight', 'bias'] on the meta device have no values",
        lambda b, p: layers.gather_state(_on_meta(linear)),
    ),
    ("save: ['weight', 'bias'] on the meta", lambda b, p: layers.save(_on_meta(linear), p)),
    (
        "save: ['weight'] on the meta",
        lambda b, p: layers.save(_on_meta(linear) if b.worker else linear(), p, sharded=True),
    ),
    (
        "['cache'] on the meta device are in no state",
        lambda b, p: layers.load(_with_a_lost_buffer(), p),
    ),
    (
        "worker 0: call linop.layers.save; worker 1: call linop.layers.gather_state",
        lambda b, p: layers.gather_state(linear()) if b.worker else layers.save(linear(), p),
    ),
]


@pytest.mark.parametrize(("words", "call"), MISTAKES, ids=[words for words, _ in MISTAKES])
def test_a_mistake_is_the_same_error_on_every_worker(saved: Path, words: str, call: Any) -> None:
    def main(backend: Any) -> str:
        with pytest.raises(LinopError) as caught:
            call(backend, saved / "file")
        return str(caught.value)

    first, second = launch(main, 2)
    assert words in first
    assert first == second
    assert value_in(saved / "file") == 3
