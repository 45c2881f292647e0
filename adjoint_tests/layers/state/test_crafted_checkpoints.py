"""No checkpoint runs code, or reads other files: pickles and indices that were made to."""

from __future__ import annotations

import copyreg
import importlib.util
import io
import os
import pickle
import shutil
import warnings
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

import torch
from torch.distributed.checkpoint import metadata as torchs
from torch.distributed.checkpoint.filesystem import _StorageInfo

from linop.layers.state import files
from support.layers.checkpoints import (
    edited,
    loads_or_refuses,
    torch_alone,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
EITHER = pytest.mark.parametrize("sharded", [False, True], ids=["file", "folder"])


@pytest.mark.parametrize(
    ("boxes", "words"),
    [
        ([(0, 8)], "elements of 'weight' are missing in the checkpoint"),
        ([(0, 5), (4, 8)], "elements of 'weight' are in the checkpoint twice"),
        ([(0, 5), (5, 9)], "a chunk of 'weight' lies outside of its shape (2, 8)"),
    ],
)
def test_elements_that_are_missing_or_twice_are_refused(
    tmp_path: Path, boxes: list[tuple[int, int]], words: str
) -> None:
    torch_alone(tmp_path / "x")
    file = next((tmp_path / "x").glob("*.distcp"))

    def change(index: Any) -> None:
        chunks = index.state_dict_metadata["weight"].chunks
        chunks.clear()
        for start, end in boxes:
            sizes = torch.Size((2 - (len(boxes) == 1), end - start))
            chunks.append(torchs.ChunkStorageMetadata(torch.Size((0, start)), sizes))
            item = io.BytesIO()
            torch.save(torch.full(sizes, 3.0, dtype=torch.float64), item)
            info = _StorageInfo(file.name, file.stat().st_size, item.tell())
            index.storage_data[torchs.MetadataIndex("weight", [0, start])] = info
            file.write_bytes(file.read_bytes() + item.getvalue())

    edited(tmp_path / "x", change)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert words in loads_or_refuses(tmp_path / "x", 3)


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path, call: Any = os.mkdir) -> None:
        self.path, self.call = str(path), call

    def __reduce__(self) -> Any:
        return self.call, (self.path,)


def _in_storage(index: Any, evil: Any) -> None:
    key = next(iter(index.storage_data))
    index.storage_data[key] = _StorageInfo(evil, 0, 1)


def _in_planner_data(index: Any, evil: Any) -> None:
    index.planner_data = {"weight": ("weight",), "bias": (evil,)}


def _as_a_tensor(index: Any, evil: Any) -> None:
    index.state_dict_metadata["weight"] = evil


def _in_a_tensor(index: Any, evil: Any) -> None:
    index.state_dict_metadata["weight"].size = evil


CRAFTED_INDEX: list[Callable[[Any, Any], Any]] = [
    lambda index, evil: evil,
    _in_storage,
    _in_planner_data,
    _as_a_tensor,
    _in_a_tensor,
]


@pytest.mark.parametrize("change", CRAFTED_INDEX)
def test_objects_in_an_index_are_not_made(tmp_path: Path, change: Any) -> None:
    torch_alone(tmp_path / "x")
    edited(tmp_path / "x", lambda index: change(index, Evil(tmp_path / "ran")))
    said = loads_or_refuses(tmp_path / "x", 3)
    assert "refers to posix.mkdir, which is refused" in said
    assert not (tmp_path / "ran").exists()
    pickle.loads((tmp_path / "x" / ".metadata").read_bytes())  # as torch's own reader does
    assert (tmp_path / "ran").exists()


def _text(path: Path) -> bytes:
    return b"X" + len(str(path)).to_bytes(4, "little") + str(path).encode()


def _short(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()


FILESYSTEM = "torch.distributed.checkpoint.filesystem"
CRAFTED_CODE: dict[str, Callable[[Path], bytes]] = {
    "global": lambda p: b"cos\nmkdir\n(" + _text(p) + b"tR.",
    "instance": lambda p: b"(" + _text(p) + b"ios\nmkdir\n.",
    "object": lambda p: b"(cos\nmkdir\n" + _text(p) + b"o.",
    "new": lambda p: b"\x80\x02cos\nmkdir\n" + _text(p) + b"\x85\x81.",
    # An allowed module, and a name with a dot in it: protocol 4 follows those.
    "dotted": lambda p: b"\x80\x04" + _short(FILESYSTEM) + _short("os.mkdir") + b"\x93(" + _text(p)
    + b"tR.",
    "dotted class": lambda p: b"\x80\x04" + _short(FILESYSTEM) + _short("_StorageInfo.__init__")
    + b"\x93(" + _text(p) + b"tR.",
    "getattr": lambda p: b"cbuiltins\ngetattr\n(cos\nopen\nX\x05\0\0\0mkdirtR(" + _text(p) + b"tR.",
    "eval": lambda p: b"cbuiltins\neval\n(" + _text(p) + b"tR.",
    "copyreg": lambda p: b"ccopyreg\n_reconstructor\n(cos\nmkdir\ncbuiltins\nobject\nNtR.",
    "extension": lambda p: b"\x80\x02\x82\xf0(" + _text(p) + b"tR.",
    "torch": lambda p: b"ctorch\nload\n(" + _text(p) + b"tR.",
    "torch's storage": lambda p: b"ctorch.storage\n_load_from_bytes\n(" + _text(p) + b"tR.",
    "allowed module": lambda p: f"c{FILESYSTEM}\nFileSystem\n(tR.".encode(),
    "persistent": lambda p: b"X\x01\0\0\0aQ.",
    # Attributes of a class, not of an object.
    "class": lambda p: f"c{FILESYSTEM}\n_StorageInfo\n".encode()
    + b"N}X\x0d\0\0\0relative_pathX\x03\0\0\0../s\x86b.",
}  # fmt: skip


@pytest.fixture
def an_extension() -> Iterator[None]:
    copyreg.add_extension("posix", "mkdir", 0xF0)
    yield
    copyreg.remove_extension("posix", "mkdir", 0xF0)


@pytest.mark.parametrize("kind", CRAFTED_CODE)
@pytest.mark.usefixtures("an_extension")
def test_pickles_of_every_kind_are_refused(tmp_path: Path, kind: str) -> None:
    torch_alone(tmp_path / "x")
    (tmp_path / "x" / ".metadata").write_bytes(CRAFTED_CODE[kind](tmp_path / "ran"))
    said = loads_or_refuses(tmp_path / "x", 3)
    assert "is no index of a checkpoint" in said
    assert not (tmp_path / "ran").exists()
    assert not hasattr(_StorageInfo, "relative_path")


class _Early(pickle.Pickler):
    """Pickles enumerations as Python 3.11.0 to 3.11.3 does, that of Debian 12 among them."""

    def reducer_override(self, given: Any) -> Any:
        return (getattr, (type(given), given.name)) if isinstance(given, Enum) else NotImplemented


def test_indices_of_every_python_are_read(tmp_path: Path) -> None:
    torch_alone(tmp_path / "x")
    index = tmp_path / "x" / ".metadata"
    made = io.BytesIO()
    _Early(made).dump(pickle.loads(index.read_bytes()))
    assert b"getattr" in made.getvalue()
    index.write_bytes(made.getvalue())
    assert loads_or_refuses(tmp_path / "x", 3) == ""


def test_objects_in_files_are_refused(tmp_path: Path) -> None:
    evil = Evil(tmp_path / "ran")
    torch.save({"weight": evil, "bias": torch.zeros(2)}, tmp_path / "file")
    torch.save({"model": {}, "optimizer": evil}, tmp_path / "other")
    files.seal((tmp_path / "other").open("r+b"))  # with a right digest, too
    for name in ("file", "other"):
        assert "could be code" in loads_or_refuses(tmp_path / name, 3, True)
    assert not (tmp_path / "ran").exists()
    torch.load(tmp_path / "file", weights_only=False)
    assert (tmp_path / "ran").exists()


def test_objects_in_shards_are_refused(tmp_path: Path) -> None:
    evil = Evil(tmp_path / "ran")
    torch_alone(tmp_path / "x", optimizer={"param_groups": {"0": {"lr": evil}}})
    torch_alone(tmp_path / "y")
    item = io.BytesIO()
    torch.save(evil, item)
    file = next((tmp_path / "y").glob("*.distcp"))

    def at_the_end(index: Any) -> None:
        for key in index.storage_data:
            index.storage_data[key] = _StorageInfo(file.name, file.stat().st_size, item.tell())

    edited(tmp_path / "y", at_the_end)
    file.write_bytes(file.read_bytes() + item.getvalue())
    for name, optimizer in (("x", True), ("y", False)):
        with pytest.warns(UserWarning, match="has no digests"):
            assert "could be code" in loads_or_refuses(tmp_path / name, 3, optimizer)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("kind", ["relative", "absolute", "link", "index"])
def test_files_outside_of_the_folder_are_not_read(tmp_path: Path, kind: str) -> None:
    path, other = tmp_path / "x", tmp_path / "other"
    torch_alone(path)
    file = next(path.glob("*.distcp"))
    shutil.copy(file, other)
    if kind == "link":
        file.unlink()
        file.symlink_to(other)
    elif kind == "index":
        shutil.move(path / ".metadata", tmp_path / "index")
        (path / ".metadata").symlink_to(tmp_path / "index")
    else:

        def change(index: Any) -> None:
            for info in index.storage_data.values():
                info.relative_path = "../other" if kind == "relative" else str(other)

        edited(path, change)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert "points to a file outside" in loads_or_refuses(path, 3)
