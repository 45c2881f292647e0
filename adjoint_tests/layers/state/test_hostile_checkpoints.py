"""A checkpoint that was made to exhaust who loads it is refused on all workers, at once and with
little memory, and nothing is changed."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
import tracemalloc
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

import torch

from linop import launch, layers
from support.layers import hostile_files as hostile
from support.layers.checkpoints import adam, filled, loads_or_refuses, save_value, torch_alone

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.timeout(60),
]
MOST = 128 * 2**20
"""Bytes that a refusal may take: more than the 64 MiB that are always allowed."""


def refused(path: Path, optimizer: bool = False) -> str:
    """The error of both workers."""
    tracemalloc.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            said = loads_or_refuses(path, 3, optimizer)
        assert tracemalloc.get_traced_memory()[1] < MOST
    finally:
        tracemalloc.stop()
    assert said, "it was loaded"
    return said


@given(
    kind=st.sampled_from(list(hostile.VALUES)),
    place=st.sampled_from(list(hostile.PLACES)),
    times=st.integers(120, 240),
    form=st.sampled_from(["sealed", "plain", "legacy", "index", "item"]),
    optimizer=st.booleans(),
)
def test_hostile_pickles_are_refused_everywhere(
    kind: str, place: str, times: int, form: str, optimizer: bool
) -> None:
    value = hostile.PLACES[place](hostile.VALUES[kind](times))
    data = hostile.HEAD + value + hostile.END
    folder = Path(tempfile.mkdtemp(prefix="linop-test-"))
    path = folder / "x"
    if form in ("index", "item"):
        hostile.in_folder(path, data, form, torch_alone)
    elif form == "legacy":
        path.write_bytes(hostile.legacy(data))
    else:
        path.write_bytes(hostile.archive(data, sealed=form == "sealed"))
    refused(path, optimizer)
    shutil.rmtree(folder)


@pytest.mark.parametrize("sealed", [True, False])
def test_zeros_are_not_unpacked(tmp_path: Path, sealed: bool) -> None:
    data = hostile.HEAD + b"}" + hostile.END
    (tmp_path / "x").write_bytes(hostile.archive(data, sealed, packed=512 * 2**20))
    assert (tmp_path / "x").stat().st_size < 2**20
    said = refused(tmp_path / "x")
    assert "at most 67" in said and "LINOP_LOAD_BYTES" in said, said


def test_records_that_overlap_are_refused(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data = hostile.archive(hostile.HEAD + b"}" + hostile.END, twice=True)
    (tmp_path / "x").write_bytes(data)
    assert "records twice" in refused(tmp_path / "x")


def test_a_file_larger_than_the_model_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "x").open("wb") as file:
        file.truncate(2**40)
    said = refused(tmp_path / "x")
    assert "of the model's tensors" in said and "LINOP_LOAD_BYTES" in said, said


def test_looking_through_many_objects_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a small file, since they are packed."""
    data = hostile.HEAD + hostile.as_value(b"(" + 40_000 * b"N" + b"l") + hostile.END
    (tmp_path / "x").write_bytes(hostile.archive(data))
    monkeypatch.setenv("LINOP_LOAD_BYTES", "500000")
    assert "a look through its objects takes" in refused(tmp_path / "x")


@pytest.mark.parametrize("value", [None, "x", [1, 2], 1j, bytearray(5)])
def test_a_state_that_an_optimizer_refuses_changes_nothing(tmp_path: Path, value: Any) -> None:
    """Nor the model: it is tried before."""

    def save(_: Any) -> None:
        model = filled(3)
        layers.save(model, tmp_path / "x", adam(model, 0.5))

    launch(save, 2)
    state = torch.load(tmp_path / "x")
    state["optimizer"]["state"][0]["step"] = value
    torch.save(state, tmp_path / "x")
    assert loads_or_refuses(tmp_path / "x", 3, optimizer=True)


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("LINOP_LOAD_BYTES", "100", "at most 100 are read (LINOP_LOAD_BYTES=100"),
        ("LINOP_LOAD_DEPTH", "3", "nested more than 3 levels deep (LINOP_LOAD_DEPTH=3)"),
        ("LINOP_LOAD_TIME", "1e-9", "takes too long (LINOP_LOAD_TIME=1e-9"),
        ("LINOP_LOAD_DEPTH", "many", "LINOP_LOAD_DEPTH: expected a whole number from 1"),
    ],
)
@pytest.mark.parametrize("sharded", [False, True], ids=["file", "folder"])
def test_limits_are_settings(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sharded: bool,
    variable: str,
    value: str,
    words: str,
) -> None:
    save_value(tmp_path / "x", 3, sharded)
    monkeypatch.setenv(variable, value)
    assert words in loads_or_refuses(tmp_path / "x", 3)
    monkeypatch.delenv(variable)
    assert loads_or_refuses(tmp_path / "x", 3) == ""


@pytest.mark.parametrize("sharded", [False, True], ids=["file", "folder"])
def test_pipes_are_not_waited_for(tmp_path: Path, sharded: bool) -> None:
    where = tmp_path / "x"
    if sharded:
        save_value(where, 3, sharded)
        where = where / ".metadata"
        where.unlink()
    os.mkfifo(where)
    said = loads_or_refuses(tmp_path / "x", 3)
    assert "no regular file" in said or "there is no file" in said


def test_files_of_old_versions_of_torch_load(tmp_path: Path) -> None:
    state = {
        k: torch.full_like(x, 3) for k, x in torch.nn.Linear(8, 2).double().state_dict().items()
    }
    torch.save(state, tmp_path / "x", _use_new_zipfile_serialization=False)
    with pytest.warns(UserWarning, match="neither digests nor CRCs"):
        assert loads_or_refuses(tmp_path / "x", 3) == ""
