"""Index of a folder of torch's distributed checkpointing, read without running code in its pickle.

Its file `.metadata` is a pickle. Objects in it become inert records here, from which names, numbers
and dtypes are read, each checked; classes outside of a list are refused. After the pickle, which
torch's reader ignores, linop writes digests of all items in the folder.
"""

from __future__ import annotations

import hashlib
import io
import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from linop.errors import BackendError
from linop.layers.state.files import SHARD, damaged
from linop.layers.state.limits import Limits
from linop.layers.state.pickle_scan import Scan

NAME = ".metadata"
_MARK = b"\nlinop digests\n"
_DIGEST = 64

Numbers = tuple[int, ...]

_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED = {
    _METADATA: "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata "
    "TensorProperties MetadataIndex StorageMeta _MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    # As torch wrote them up to 2.2.
    "torch.distributed._shard.sharded_tensor.metadata": "TensorProperties MEM_FORMAT_ENCODING",
    "torch.serialization": "_get_layout",
    "pathlib": "Path PosixPath WindowsPath",
    "pathlib._local": "Path PosixPath WindowsPath",
    "builtins": "getattr",  # of an Enum's member, from Python 3.11.0 to 3.11.3; it is not called
}
"""Names that a `.metadata` may use, by module; beside OrderedDict, torch.Size and dtypes."""


class _Record:
    """Stand-in for an object of a pickle, which is not constructed: its state alone."""

    __slots__ = ("state",)
    state: Any

    def __new__(cls, *_: Any) -> _Record:
        self = super().__new__(cls)
        self.state = {}
        return self

    def __setstate__(self, state: Any) -> None:
        self.state = state


def allowed(module: str, name: str) -> bool:
    """True for a name that a `.metadata` may use."""
    if module == "torch":
        return name == "Size" or isinstance(vars(torch).get(name), torch.dtype)
    return (module, name) == ("collections", "OrderedDict") or (
        name in _ALLOWED.get(module, "").split()
    )


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and (name == "Size" or isinstance(vars(torch).get(name), torch.dtype)):
            return vars(torch)[name]
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        assert allowed(module, name), "looked through before"
        # A new class for each, so that a pickle cannot change a class of linop.
        return type(name, (_Record,), {"__slots__": ()})


@dataclass(frozen=True)
class Location:
    """Location of a stored item, and its digest, if there is one."""

    file: str
    offset: int
    length: int
    digest: str | None


@dataclass(frozen=True)
class Chunk:
    """A rectangular part of a tensor."""

    offsets: Numbers
    sizes: Numbers
    location: Location


@dataclass(frozen=True)
class Entry:
    """A tensor in a checkpoint; an object, where its dtype is None, in one chunk."""

    dtype: Any
    shape: Numbers
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Index:
    """Contents of a folder, by name.

    Args:
        entries: tensors and objects.
        paths: of each, the keys that lead to it in the nested state.
        sealed: all of it has digests.
        digest: of the index itself.
    """

    entries: Mapping[str, Entry]
    paths: Mapping[str, tuple[Any, ...]]
    sealed: bool
    digest: str


def sealed(metadata: Any, digests: Mapping[str, str]) -> bytes:
    """A `.metadata` with digests.

    Args:
        metadata: torch's.
        digests: by `key_of`.
    """
    body = pickle.dumps(metadata) + _MARK + json.dumps(digests).encode() + b"\n"
    return body + hashlib.sha256(body).hexdigest().encode()


def key_of(file: str, offset: int) -> str:
    """Key of a stored item among digests."""
    return f"{file}:{offset}"


def index_of(data: bytes, path: Path, limits: Limits) -> Index:
    """Read the index from a `.metadata`.

    Args:
        data: all of the file.
        path: of the file, for errors.
        limits: of what is read.

    Raises:
        BackendError: it is damaged, or no index of tensors, or refers to anything else.
    """
    pickled, mark, rest = data.rpartition(_MARK)
    digests = None
    if mark:
        if hashlib.sha256(data[:-_DIGEST]).hexdigest().encode() != data[-_DIGEST:]:
            raise BackendError(damaged(path, "its digest is another"))
    try:
        if mark:
            digests = _mapping(json.loads(rest[:-_DIGEST]))
        pickled = pickled if mark else data
        if Scan(io.BytesIO(pickled), allowed, limits).stored:
            raise BackendError("it refers to objects outside of it, which is refused")
        root = _Unpickler(io.BytesIO(pickled)).load()
        entries, paths = _decoded(root, digests)
    except Exception as error:
        raise BackendError(f"{str(path)!r} is no index of a checkpoint: {error}") from error
    for entry in entries.values():
        for chunk in entry.chunks:
            unsealed = chunk.location.digest is None
            if unsealed and (mark or SHARD.fullmatch(chunk.location.file)):
                raise BackendError(damaged(path, "digests are missing"))
    return Index(entries, paths, bool(mark), hashlib.sha256(data).hexdigest())


def _decoded(
    root: Any, digests: Mapping[str, str] | None
) -> tuple[dict[str, Entry], dict[str, tuple[Any, ...]]]:
    state = _state(root, "Metadata")
    locations = {}
    for index, info in _mapping(state["storage_data"]).items():
        key = _state(index, "MetadataIndex")
        offset = key.get("offset")
        where = None if offset is None else _numbers(offset)
        locations[_text(key["fqn"]), where] = _location(_state(info, "_StorageInfo"), digests)
    entries = {
        _text(name): _entry(name, entry, locations)
        for name, entry in _mapping(state["state_dict_metadata"]).items()
    }
    said = _mapping(state.get("planner_data") or {})
    return entries, {name: _path(said.get(name, (name,))) for name in entries}


def _location(info: Mapping[str, Any], digests: Mapping[str, str] | None) -> Location:
    if info.get("transform_descriptors"):
        raise BackendError("what is stored is transformed, which linop does not read")
    file = _text(info["relative_path"])
    offset, length = _numbers((info["offset"], info["length"]))
    digest = None if digests is None else digests.get(key_of(file, offset))
    return Location(file, offset, length, digest)


def _entry(
    name: str, entry: Any, locations: Mapping[tuple[str, Numbers | None], Location]
) -> Entry:
    if type(entry).__name__ == "BytesStorageMetadata":
        return Entry(None, (), (Chunk((), (), locations[name, None]),))
    state = _state(entry, "TensorStorageMetadata")
    dtype = _dtype(state["properties"])
    shape = _numbers(state["size"])
    chunks = []
    for one in state["chunks"]:
        box = _state(one, "ChunkStorageMetadata")
        offsets, sizes = _numbers(box["offsets"]), _numbers(box["sizes"])
        ends = [a + n for a, n in zip(offsets, sizes, strict=True)]
        if any(end > length for end, length in zip(ends, shape, strict=True)):
            raise BackendError(f"a chunk of {name!r} lies outside of its shape {shape}")
        chunks.append(Chunk(offsets, sizes, locations[name, offsets]))
    return Entry(dtype, shape, tuple(chunks))


def _dtype(properties: Any) -> Any:
    _expect(type(properties).__name__ == "TensorProperties", properties)
    state = properties.state
    dtype = state.get("dtype") if isinstance(state, dict) else state[0]
    _expect(isinstance(dtype, torch.dtype), dtype)
    return dtype


def _state(record: Any, kind: str) -> dict[str, Any]:
    """The attributes of a record of some kind."""
    _expect(isinstance(record, _Record) and type(record).__name__ == kind, record)
    return _mapping(record.state)


def _mapping(value: Any) -> dict[Any, Any]:
    _expect(type(value) is dict, value)
    known: dict[Any, Any] = value
    return known


def _text(value: Any) -> str:
    _expect(type(value) is str, value)
    return str(value)


def _numbers(value: Any) -> Numbers:
    _expect(isinstance(value, tuple) and all(type(n) is int and n >= 0 for n in value), value)
    return tuple(value)


def _path(value: Any) -> tuple[Any, ...]:
    _expect(isinstance(value, tuple) and all(type(key) in (str, int) for key in value), value)
    return tuple(value)


def _expect(good: bool, value: Any) -> None:
    if not good:
        raise BackendError(f"a {type(value).__name__} where it is not expected")
