"""Files of torch.save, read after a look through them: no code of theirs runs, and no more memory
is taken than limits allow (`linop.layers.state.limits`).

torch's own reader makes the tensors, with `weights_only`; before that, the pickle is followed
without making objects (`linop.layers.state.pickle_scan`), and the sizes of all records are compared
with the file's and with what it asks for.
"""

from __future__ import annotations

import io
import os
import stat
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch

from linop.errors import ArgumentError, BackendError
from linop.layers.state.limits import Limits
from linop.layers.state.pickle_scan import Node, Scan

_LEGACY = 5
"""Pickles at the begin of a file in the format that torch wrote up to 1.5."""
_PICKLE = "data.pkl"
_PLAIN = {
    "collections": "OrderedDict Counter",
    "builtins": "set complex bytearray",
    "__builtin__": "set complex bytearray",
    "_codecs": "encode",
    "torch": "Size Tensor device",
    "torch.nn.parameter": "Parameter",
    "torch._tensor": "_rebuild_from_type_v2",
    "torch._utils": "_rebuild_tensor _rebuild_tensor_v2 _rebuild_tensor_v3 _rebuild_parameter "
    "_rebuild_parameter_with_state",
    "torch.storage": "UntypedStorage TypedStorage",
    "torch.serialization": "_get_layout",
}
"""Classes and functions that a state may refer to, by module; beside dtypes and storages."""


def _allowed(module: str, name: str) -> bool:
    if name in _PLAIN.get(module, "").split():
        return True
    return module == "torch" and (
        isinstance(vars(torch).get(name), torch.dtype) or _storage_dtype(name) is not None
    )


def _storage_dtype(name: str) -> Any:
    """The dtype of a class of storages of torch; None for another name."""
    if name == "UntypedStorage":
        return torch.uint8
    return torch.storage._storage_type_to_dtype_map().get(name)


def named(path: str | bytes | os.PathLike[Any]) -> Path:
    """The path of a checkpoint, which need not be there.

    Raises:
        ArgumentError: it is empty, has a null byte, or is no path.
    """
    try:
        text = os.fsdecode(os.fspath(path))
    except TypeError as error:
        raise ArgumentError(f"{error}; the path of a checkpoint expected") from None
    if not text or "\0" in text:
        raise ArgumentError(f"{text!r} is no path; that of a checkpoint expected")
    return Path(text)


def inside(folder: Path, name: str) -> Path:
    """Resolved path of a file in a folder; it need not be there.

    Raises:
        BackendError: the name or a link leads out of the folder.
    """
    file = (folder / name).resolve()
    if not file.is_relative_to(folder.resolve()):
        raise BackendError(f"{name!r} points to a file outside of {str(folder)!r}: refused")
    return file


@contextmanager
def regular(path: Path) -> Iterator[IO[bytes]]:
    """A regular file, opened for reading.

    Raises:
        BackendError: it is none: a pipe could be waited for for ever, a device never end.
        OSError: it cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise BackendError(f"{str(path)!r} is no regular file; a checkpoint expected")
    with os.fdopen(descriptor, "rb") as file:
        yield file


def loaded(file: Any, name: str, limits: Limits) -> Any:
    """The object in a file of torch.save, with tensors in host memory.

    Args:
        file: a stream at its begin, which has nothing else.
        name: of the file, for errors.

    Raises:
        BackendError: it is refused. Errors of torch.load: it cannot be read.
    """
    try:
        archive = zipfile.ZipFile(file) if zipfile.is_zipfile(file) else None
        if archive is None:
            _look_through_legacy(file, name, limits)
        else:
            _look_through(archive, name, limits)
    except BackendError as error:
        raise BackendError(f"{name!r} is refused, and nothing was loaded: {error}") from None
    except Exception as error:  # of zipfile or pickletools, which meet any bytes
        raise BackendError(f"{name!r} cannot be read: {type(error).__name__}: {error}") from error
    file.seek(0)
    return torch.load(file, map_location="cpu", weights_only=True)


def _look_through(archive: zipfile.ZipFile, name: str, limits: Limits) -> None:
    records = archive.infolist()
    limits.take(sum(one.file_size for one in records), name)
    by_name = {one.filename: one for one in records}
    if len(by_name) < len(records) or min(one.header_offset for one in records) != 0:
        raise BackendError("it is no archive that torch writes: records twice, or not at its begin")
    pickles = [one for one in records if one.filename.partition("/")[2] == _PICKLE]
    if len(pickles) != 1:
        raise BackendError(f"it has {len(pickles)} records {_PICKLE!r}; one expected")
    data = archive.read(pickles[0])
    scan = Scan(io.BytesIO(data), _allowed, limits)
    folder = pickles[0].filename.removesuffix(_PICKLE)
    for key, count in _storages(scan).items():
        record = by_name.get(f"{folder}data/{key}")
        if record is None or record.file_size < count:
            raise BackendError(f"tensor {key!r} of {count} bytes is not in it")


def _look_through_legacy(file: Any, name: str, limits: Limits) -> None:
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    limits.take(size, name)
    for _ in range(_LEGACY):
        scan = Scan(file, _allowed, limits)
        if sum(_storages(scan).values()) > size:
            raise BackendError("its tensors take more bytes than it has")


def _storages(scan: Scan) -> dict[str, int]:
    """Bytes of the tensors' storages, by key."""
    found: dict[str, int] = {}
    for identifier in scan.stored:
        kind, key, _, count = _storage(identifier)
        dtype = _storage_dtype(kind.name.rpartition(" ")[2])
        odd = dtype is None or type(key.value) is not str
        if odd or type(count.value) is not int or count.value < 0:
            raise BackendError("a tensor's storage is described otherwise than torch does")
        name = str(key.value)
        found[name] = max(found.get(name, 0), count.value * dtype.itemsize)
    return found


def _storage(identifier: Node) -> Sequence[Node]:
    """Class, key, device and number of elements, of a persistent identifier."""
    inner = identifier.inner
    if len(inner) not in (5, 6) or inner[0].value != "storage":
        raise BackendError("a tensor's storage is described otherwise than torch does")
    return inner[1:5]
