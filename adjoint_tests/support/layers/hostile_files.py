"""Checkpoints made to exhaust who loads them: pickles by their instructions, and archives. Needs
torch.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from linop.layers.state import files

HEAD, END = b"\x80\x02", b"."
MANY = 10**9


def _again(start: bytes, step: bytes, times: int) -> bytes:
    """Instructions that make an object, and again and again one that has it twice."""
    return start + (b"q\x00h\x00" + step) * times


def text(words: str) -> bytes:
    return b"X" + struct.pack("<I", len(words)) + words.encode()


def tuples(times: int) -> bytes:
    """A tuple that takes 2^times steps to hash."""
    return _again(b")", b"\x86", times)


def lists(times: int) -> bytes:
    """A list that takes 2^times steps to print."""
    return _again(b"]", b"\x86", 1) + (b"q\x00](h\x00h\x00e") * times


def deep(times: int) -> bytes:
    """Lists, so many within each other."""
    return b"]" * (times + 1) + b"a" * times


def cycle(_: int) -> bytes:
    return b"]q\x05h\x05a"


def memory(_: int) -> bytes:
    """A call that takes a terabyte."""
    return b"c__builtin__\nbytearray\n\x8a\x06" + (10**12).to_bytes(6, "little") + b"\x85R"


def code(_: int) -> bytes:
    return b"cposix\nmkdir\n" + text("/nowhere/at/all") + b"\x85R"


def storage(_: int) -> bytes:
    """A tensor of more elements than are stored."""
    identifier = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu")
    identifier += b"J" + struct.pack("<i", 2**30) + b"tQ"
    shape = b"K\x04\x85K\x01\x85"
    rest = b"K\x00" + shape + b"\x89ccollections\nOrderedDict\n)RtR"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + identifier + rest


def by_number(times: int) -> bytes:
    """A call that makes as many bytes, or elements, as a number says."""
    kinds = b"builtins\nbytearray", b"torch\nTensor", b"torch.storage\nUntypedStorage"
    call = (
        b"c" + kinds[times % len(kinds)] + b"\n\x8a\x08" + (2**33).to_bytes(8, "little") + b"\x85"
    )
    return call + (b"R" if times % 2 else b"\x81")


def colliding(times: int) -> bytes:
    """A dict, a set, or a call of pairs, of different numbers, tuples or complex numbers that have
    one hash: each is compared with all before it."""

    def key(k: int) -> bytes:
        number = b"\x8a\x0a" + ((2**61 - 1) * k).to_bytes(10, "little")
        real, imaginary = (struct.pack(">d", x * k) for x in (-1000003.0, 1.0))
        both = b"c__builtin__\ncomplex\nG" + real + b"G" + imaginary + b"\x86R"
        return (number, number + b"\x85", both)[times % 3]

    keys = [key(k + 1) for k in range(30 * times)]
    if times // 3 % 3 == 0:
        return b"}(" + b"K\x01".join(keys) + b"K\x01u"
    if times // 3 % 3 == 1:
        return b"c__builtin__\nset\n](" + b"".join(keys) + b"e\x85R"
    return b"ccollections\nOrderedDict\n](" + b"K\x01\x86".join(keys) + b"K\x01\x86e\x85R"


VALUES: dict[str, Callable[[int], bytes]] = {
    f.__name__: f for f in (tuples, lists, deep, cycle, memory, code, storage, by_number, colliding)
}
"""Objects, by the number of steps."""


def as_key(value: bytes) -> bytes:
    return b"}(" + value + b"K\x01u"


def as_value(value: bytes) -> bytes:
    return b"}(" + text("weight") + value + b"u"


def in_pairs(value: bytes) -> bytes:
    """A call that hashes the object."""
    return b"ccollections\nOrderedDict\n](" + value + b"K\x01\x86e\x85R"


def in_optimizer(value: bytes) -> bytes:
    inner = (
        b"}(" + text("param_groups") + b"](}(" + text("lr") + value + b"ue" + text("state") + b"}u"
    )
    return b"}(" + text("model") + b"}" + text("optimizer") + inner + b"u"


PLACES = {f.__name__: f for f in (as_key, as_value, in_pairs, in_optimizer)}


def archive(data: bytes, sealed: bool = True, packed: int = 0, twice: bool = False) -> bytes:
    """A file of torch.save with a pickle.

    Args:
        sealed: with a right digest.
        packed: zeros in a record that is compressed.
        twice: the directory at the end has a record twice.
    """
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as zipped:
        zipped.writestr("archive/data.pkl", data)
        zipped.writestr("archive/byteorder", "little")
        zipped.writestr("archive/data/0", bytes(16))
        zipped.writestr("archive/version", "3\n")
        if packed:
            with zipped.open(_compressed("archive/data/1"), "w") as record:
                for _ in range(packed // 2**20):
                    record.write(bytes(2**20))
        if twice:
            zipped.filelist.append(zipped.filelist[2])
    if sealed:
        files.seal(out)
    return out.getvalue()


def _compressed(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.compress_type = zipfile.ZIP_DEFLATED
    return info


def legacy(data: bytes) -> bytes:
    """A file in the format that torch wrote up to 1.5, with a pickle."""
    out = io.BytesIO()
    torch.save({"weight": torch.zeros(2)}, out, _use_new_zipfile_serialization=False)
    whole, begin = out.getvalue(), 0
    for _ in range(3):  # a magic number, a version, the system
        begin = whole.index(b".", _end_of(whole, begin) - 1) + 1
    return whole[:begin] + data + pickle.dumps([])


def _end_of(whole: bytes, begin: int) -> int:
    stream = io.BytesIO(whole[begin:])
    pickle.load(stream)  # of torch.save's, here
    return begin + stream.tell()


def in_folder(path: Path, data: bytes, where: str, folder: Callable[[Path], None]) -> None:
    """Put a hostile pickle into a folder: as its index, or as a stored item.

    Args:
        where: "index" or "item".
        folder: makes a good one.
    """
    folder(path)
    if where == "index":
        (path / ".metadata").write_bytes(data)
        return
    file = next(path.glob("*.distcp"))
    hostile = archive(data, sealed=False)
    index: Any = pickle.loads((path / ".metadata").read_bytes())
    for info in index.storage_data.values():
        info.offset, info.length = 0, len(hostile)
    file.write_bytes(hostile)
    (path / ".metadata").write_bytes(pickle.dumps(index))
