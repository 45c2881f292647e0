"""Control messages as bytes, in a format of linop's own: data that are read without running code.

A message is a tree of None, booleans, numbers, texts, bytes, tuples, lists, dicts, sets, arrays,
and of *records*: linop's own named tuples, data classes, enumerations and errors, and other classes
that are listed by `allow`. A record is read as its class and its fields; no constructor is called,
no module is imported. Depth and size are bounded, and every length is checked against the bytes
that are there before memory is allocated for it.
"""

from __future__ import annotations

import dataclasses
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import cache
from pathlib import Path, PurePath
from typing import Any, NamedTuple, TypeVar

import numpy as np

from linop.errors import ArgumentError, BackendError, LinopError, restated
from linop.spaces.partition import Partition
from linop.spaces.tensor import TensorSpace

DEEPEST = 64
"""Levels of a message within each other, at most."""
LONGEST_MESSAGE = 2**30
"""Bytes of a message, at most."""
_REFUSED = b"!"
"""Start of the message of an item that cannot be sent; no other begins so."""
_DIGITS = 2**14
"""Bytes of an integer, at most."""

_LENGTH, _FLOAT, _PAIR = struct.Struct("<I"), struct.Struct("<d"), struct.Struct("<dd")
_CONSTANTS = {None: b"N", True: b"T", False: b"F", Ellipsis: b"."}

Item = TypeVar("Item")
_Put = Callable[[bytes], None]
_Writer = Callable[[Any, _Put, int], None]
"""Called with a value, with what takes bytes, and with the number of levels that are left."""


class _Adapter(NamedTuple):
    """A class that is no record: its values as data, and back."""

    name: str
    data: Callable[[Any], Any]
    value: Callable[[Any], Any]


_ADAPTERS: dict[type, _Adapter] = {}
_VALUES: dict[str, _Adapter] = {}
_ALLOWED: dict[str, type] = {}


def adapt(kind: type, name: str, data: Callable[[Any], Any], value: Callable[[Any], Any]) -> None:
    """Let values of a class be sent.

    Args:
        kind: the class; of its subclasses, too, if their own are not given.
        name: in messages.
        data: gives a value as something that can be sent.
        value: gives the value again; raises an exception if the data are of none.
    """
    _ADAPTERS[kind] = _VALUES[name] = _Adapter(name, data, value)


def allow(*kinds: type) -> None:
    """Let records of other packages' classes be sent: named tuples, data classes, enumerations."""
    for kind in kinds:
        _ALLOWED[_name(kind)] = kind


def encoded(item: object) -> bytes:
    """A message.

    Raises:
        ArgumentError: something in it is none of what messages consist of; or it is too deep, or
            too long.
    """
    parts: list[bytes] = []
    try:
        _write(item, parts.append, DEEPEST)
    except (UnicodeError, OverflowError, struct.error) as error:
        raise ArgumentError(f"a control message cannot be written: {error}") from None
    data = b"".join(parts)
    if len(data) > LONGEST_MESSAGE:
        raise ArgumentError(
            f"a control message of {len(data)} bytes; at most {LONGEST_MESSAGE} are sent"
        )
    return data


def decoded(data: bytes | bytearray | memoryview) -> Any:
    """The item of a message.

    Raises:
        BackendError: the bytes are no message of linop's.
    """
    if len(data) > LONGEST_MESSAGE:
        raise BackendError(f"a control message of {len(data)} bytes; at most {LONGEST_MESSAGE}")
    reader = _Reader(bytes(data))
    try:
        item = reader.item(DEEPEST)
    except BackendError:
        raise
    except Exception as error:  # of an adapter, of hashing a key, of text, of a number
        raise BackendError(f"a control message cannot be read: {error}") from None
    if reader.at != len(reader.data):
        raise BackendError("a control message cannot be read: there are bytes after its end")
    return item


def sealed(item: object) -> bytes:
    """The message of an item for all workers; of one that cannot be sent, the reason."""
    try:
        return encoded(item)
    except ArgumentError as error:
        return _REFUSED + str(error).encode(errors="replace")


def opened(messages: Sequence[bytes], worker: int, own: Item) -> list[Item]:
    """Items of `sealed`, by worker; equal messages are read once, and give one object: those that
    are equal to this worker's its own.

    Args:
        worker, own: this worker, and its item, which is returned as it is.

    Raises:
        ArgumentError: one cannot be sent; on every worker.
    """
    for w, one in enumerate(messages):
        if one.startswith(_REFUSED):
            raise ArgumentError(f"worker {w}: {one[len(_REFUSED) :].decode(errors='replace')}")
    read: dict[bytes, Any] = {messages[worker]: own}
    for one in messages:
        if one not in read:
            read[one] = decoded(one)
    return [read[one] for one in messages]


# Writing


def _write(item: Any, put: _Put, depth: int) -> None:
    if depth == 0:
        raise ArgumentError(f"a control message is nested more than {DEEPEST} levels deep")
    kind = type(item)
    write: _Writer = _WRITERS.get(kind) or _writer(kind)  # type: ignore[arg-type]  # it hashes
    write(item, put, depth - 1)


@cache
def _writer(kind: type) -> _Writer:
    """The function that writes values of a class that is none of the usual ones."""
    if issubclass(kind, Enum):
        return _write_enum
    if issubclass(kind, LinopError):
        return _write_error
    if any(base in _ADAPTERS for base in kind.__mro__):
        return _write_adapted
    if hasattr(kind, "_fields") or dataclasses.is_dataclass(kind):
        return _write_record
    for base, write in _WRITERS.items():
        if issubclass(kind, base):
            return write
    raise ArgumentError(
        f"a value of type {kind.__module__}.{kind.__qualname__} cannot be sent to other workers; "
        f"numbers, strings, bytes, arrays, and tuples, lists and dicts of these can"
    )


def _sized(tag: bytes, data: bytes, put: _Put) -> None:
    put(tag + _LENGTH.pack(len(data)) + data)


def _write_constant(item: Any, put: _Put, depth: int) -> None:
    put(_CONSTANTS[item])


def _write_int(item: int, put: _Put, depth: int) -> None:
    data = int(item).to_bytes((item.bit_length() + 8) // 8, "little", signed=True)
    if len(data) > _DIGITS:
        raise ArgumentError(f"an integer of {len(data)} bytes cannot be sent to other workers")
    _sized(b"i", data, put)


def _write_float(item: float, put: _Put, depth: int) -> None:
    put(b"f" + _FLOAT.pack(item))


def _write_complex(item: complex, put: _Put, depth: int) -> None:
    put(b"c" + _PAIR.pack(item.real, item.imag))


def _write_text(item: str, put: _Put, depth: int) -> None:
    _sized(b"s", item.encode("utf-8", "surrogatepass"), put)


def _write_bytes(item: bytes, put: _Put, depth: int) -> None:
    _sized(b"b", bytes(item), put)


def _items_writer(tag: bytes) -> _Writer:
    def write_items(item: Any, put: _Put, depth: int) -> None:
        put(tag + _LENGTH.pack(len(item)))
        for one in item:
            _write(one, put, depth)

    return write_items


def _write_dict(item: Mapping[Any, Any], put: _Put, depth: int) -> None:
    put(b":" + _LENGTH.pack(len(item)))
    for key, value in item.items():
        _write(key, put, depth)
        _write(value, put, depth)


def _write_array(item: Any, put: _Put, depth: int) -> None:
    if item.dtype.hasobject or item.dtype.names is not None:
        raise ArgumentError(f"an array of {item.dtype} cannot be sent to other workers")
    put(b"a")
    _write((item.dtype, item.shape, item.tobytes()), put, depth)


def _write_enum(item: Enum, put: _Put, depth: int) -> None:
    put(b"e")
    _write((_known_name(type(item)), item.name), put, depth)


def _write_error(item: LinopError, put: _Put, depth: int) -> None:
    plain = restated(item, str(item))  # of a class that others know
    marks = {k: v for k, v in vars(item).items() if isinstance(v, str | int | None)}
    put(b"x")
    _write((type(plain).__qualname__, str(plain), marks), put, depth)


def _write_adapted(item: Any, put: _Put, depth: int) -> None:
    adapter = next(_ADAPTERS[base] for base in type(item).__mro__ if base in _ADAPTERS)
    put(b"@")
    _write((adapter.name, adapter.data(item)), put, depth)


def _write_record(item: Any, put: _Put, depth: int) -> None:
    values = item if isinstance(item, tuple) else [getattr(item, f) for f in _fields(type(item))]
    put(b"r")
    _write((_known_name(type(item)), tuple(values)), put, depth)


_WRITERS: dict[type, _Writer] = {
    type(None): _write_constant,
    type(Ellipsis): _write_constant,
    bool: _write_constant,
    int: _write_int,
    float: _write_float,
    complex: _write_complex,
    str: _write_text,
    bytes: _write_bytes,
    tuple: _items_writer(b"("),
    list: _items_writer(b"["),
    set: _items_writer(b"{"),
    frozenset: _items_writer(b"<"),
    dict: _write_dict,
    np.ndarray: _write_array,
}


# Classes


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _known_name(kind: type) -> str:
    name = _name(kind)
    if _class(name) is not kind:
        raise ArgumentError(f"a value of class {name} cannot be sent to other workers")
    return name


def _class(name: str) -> type | None:
    """A class whose values are inert: one of `allow`, or one of linop's that a module which is
    there already defines; None for another."""
    if name in _ALLOWED:
        return _ALLOWED[name]
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module) if module.split(".")[0] == "linop" else None
    for part in path.split("."):
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    inert = isinstance(found, type) and (
        issubclass(found, Enum) or hasattr(found, "_fields") or dataclasses.is_dataclass(found)
    )
    return found if inert and _name(found) == name else None


def _fields(kind: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def _errors(kind: type[LinopError] = LinopError) -> dict[str, type[LinopError]]:
    """linop's errors, by name."""
    found = {kind.__qualname__: kind} if kind.__module__.startswith("linop.") else {}
    for below in kind.__subclasses__():
        found = {**_errors(below), **found}
    return found


# Reading


class _Reader:
    """A message that is read from its begin to its end."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, count: int) -> bytes:
        end = self.at + count
        if end > len(self.data):
            raise BackendError("a control message cannot be read: its end is missing")
        taken, self.at = self.data[self.at : end], end
        return taken

    def numbers(self, kind: struct.Struct) -> tuple[Any, ...]:
        return kind.unpack(self.take(kind.size))

    def length(self) -> int:
        count: int
        (count,) = _LENGTH.unpack_from(self.data, self.at)
        self.at += _LENGTH.size
        if count > len(self.data) - self.at:  # each item has a byte at least
            raise BackendError("a control message cannot be read: its end is missing")
        return count

    def sized(self) -> bytes:
        begin = self.at + _LENGTH.size
        self.at = begin + self.length()
        return self.data[begin : self.at]

    def item(self, depth: int) -> Any:
        if depth == 0:
            raise BackendError(f"a control message is nested more than {DEEPEST} levels deep")
        read = _READERS.get(self.data[self.at : self.at + 1])
        self.at += 1
        if read is None:
            raise BackendError("a control message cannot be read: it is none of linop's")
        return read(self, depth - 1)

    def items(self, depth: int) -> list[Any]:
        return [self.item(depth) for _ in range(self.length())]

    def fields(self, depth: int, count: int) -> tuple[Any, ...]:
        found = self.item(depth)
        if type(found) is not tuple or len(found) != count:
            raise BackendError("a control message cannot be read: a record has other fields")
        return found


def _read_int(reader: _Reader, depth: int) -> int:
    count = reader.length()
    if count > _DIGITS:
        raise BackendError(f"a control message cannot be read: an integer of {count} bytes")
    return int.from_bytes(reader.take(count), "little", signed=True)


def _read_dict(reader: _Reader, depth: int) -> dict[Any, Any]:
    return {reader.item(depth): reader.item(depth) for _ in range(reader.length())}


def _read_array(reader: _Reader, depth: int) -> Any:
    dtype, shape, data = reader.fields(depth, 3)
    return np.frombuffer(data, dtype).reshape(shape).copy()


def _read_enum(reader: _Reader, depth: int) -> Any:
    name, member = reader.fields(depth, 2)
    kind = _class(name)
    if kind is None or not issubclass(kind, Enum):
        raise BackendError(f"a control message refers to {name}, which is refused")
    return kind[member]


def _read_error(reader: _Reader, depth: int) -> LinopError:
    name, text, marks = reader.fields(depth, 3)
    error = _errors().get(name, BackendError)(str(text))
    vars(error).update({str(k): v for k, v in marks.items()})
    return error


def _read_adapted(reader: _Reader, depth: int) -> Any:
    name, data = reader.fields(depth, 2)
    if name not in _VALUES:
        raise BackendError(f"a control message has a value of {name!r}, which is unknown here")
    return _VALUES[name].value(data)


def _read_record(reader: _Reader, depth: int) -> Any:
    name, values = reader.fields(depth, 2)
    kind: Any = _class(name)
    if kind is None or issubclass(kind, Enum):
        raise BackendError(f"a control message refers to {name}, which is refused")
    names = kind._fields if issubclass(kind, tuple) else _fields(kind)
    if len(names) != len(values):
        raise BackendError(f"a control message has a {name} of {len(values)} fields")
    if issubclass(kind, tuple):
        return tuple.__new__(kind, values)
    made = object.__new__(kind)
    for field, value in zip(names, values, strict=True):
        object.__setattr__(made, field, value)
    return made


_READERS: dict[bytes, Callable[[_Reader, int], Any]] = {
    b"N": lambda reader, depth: None,
    b"T": lambda reader, depth: True,
    b"F": lambda reader, depth: False,
    b".": lambda reader, depth: Ellipsis,
    b"i": _read_int,
    b"f": lambda reader, depth: reader.numbers(_FLOAT)[0],
    b"c": lambda reader, depth: complex(*reader.numbers(_PAIR)),
    b"s": lambda reader, depth: reader.sized().decode("utf-8", "surrogatepass"),
    b"b": lambda reader, depth: reader.sized(),
    b"(": lambda reader, depth: tuple(reader.items(depth)),
    b"[": lambda reader, depth: reader.items(depth),
    b"{": lambda reader, depth: set(reader.items(depth)),
    b"<": lambda reader, depth: frozenset(reader.items(depth)),
    b":": _read_dict,
    b"a": _read_array,
    b"e": _read_enum,
    b"x": _read_error,
    b"@": _read_adapted,
    b"r": _read_record,
}


# Values of NumPy and of the standard library


def _dtype(name: Any) -> np.dtype[Any]:
    found: np.dtype[Any] = np.dtype(str(name))
    if found.hasobject:
        raise BackendError(f"a control message has a dtype {name!r}, which is refused")
    return found


adapt(np.dtype, "dtype", lambda one: one.str if one.kind != "V" else one.name, _dtype)
adapt(
    np.generic,
    "scalar",
    np.asarray,
    lambda array: array[()],
)
adapt(PurePath, "path", str, Path)
adapt(slice, "slice", lambda one: (one.start, one.stop, one.step), lambda ends: slice(*ends))
adapt(range, "range", lambda one: (one.start, one.stop, one.step), lambda ends: range(*ends))
adapt(
    Partition,
    "partition",
    lambda one: (one.shape, one.workers),
    lambda given: Partition(*given),
)
adapt(
    TensorSpace,
    "tensor space",
    lambda one: (
        *(one.global_shape, one.partition, one.dtype, one.axes, one.name),
        {axis: one.bounds[axis] for axis in one.axes if isinstance(axis, int)},
        one.memory,
    ),
    lambda given: TensorSpace(*given[:5], bounds=given[5], memory=given[6]),
)
