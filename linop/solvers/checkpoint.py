"""Checkpoints of iterative methods: one file a worker, of NumPy's npz format, never torn.

A file is written beside its place, flushed to the disk, and renamed; the one before it stays as
``….previous``. So after a crash at any moment each worker has its part of the last two checkpoints,
and the last one that all workers have is resumed from. Nothing is pickled. State is a list of
dictionaries; of what it consists is the affair of the methods (`linop.solvers.saving`).
"""

from __future__ import annotations

import io
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from linop.spaces.vector import Vector
from linop.writing import target

State = list[dict[str, Any]]
"""State of a method for each right-hand side: vectors, numbers, texts, arrays, lists of them."""

VERSION = 1


def place(path: str | os.PathLike[Any], backend: Any) -> Path:
    """The file of this worker: the path itself in one process, else with ``.1-of-4`` behind it.

    Raises:
        ArgumentError: the path names no regular file.
    """
    worker, workers = (getattr(backend, name, None) for name in ("worker", "workers"))
    part = "" if worker is None else f".{worker}-of-{workers}"
    return target(os.fspath(path) + part)


def previous(file: Path) -> Path:
    return file.with_name(file.name + ".previous")


def save(file: Path, problem: str, iteration: int, state: State) -> None:
    """Write the state, and keep the file before it as `previous`.

    Args:
        problem: text that describes the problem and the arguments; compared by `load`.

    Raises:
        OSError: the file cannot be written; the ones before it are as they were.
    """
    arrays: dict[str, Any] = {}
    written = [_written(one, arrays) for one in state]
    head = {"version": VERSION, "problem": problem, "iteration": iteration, "state": written}
    arrays["head"] = np.frombuffer(json.dumps(head).encode(), np.uint8)
    memory = io.BytesIO()
    np.savez(memory, **arrays)
    handle, name = tempfile.mkstemp(prefix=file.name + ".", suffix=".tmp", dir=file.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(memory.getbuffer())
            stream.flush()
            os.fsync(stream.fileno())
        if file.exists():
            os.replace(file, previous(file))
        os.replace(name, file)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def iteration_of(file: Path, problem: str) -> int:
    """The iteration at which a file was saved; -1 if it is missing, damaged, or of another problem.

    All members are read, so that a damaged one is found: each has a check sum.
    """
    try:
        with np.load(file, allow_pickle=False) as found:
            head = _head(found)
            for name in found.files:
                found[name]
            same = head["version"] == VERSION and head["problem"] == problem
            return int(head["iteration"]) if same else -1
    except Exception:  # of NumPy, zipfile, zlib, json: there are many ways to be damaged
        return -1


def problem_of(file: Path) -> str:
    """The description of the problem in a file; empty if it cannot be read."""
    try:
        with np.load(file, allow_pickle=False) as found:
            return str(_head(found)["problem"])
    except Exception:
        return ""


def load(file: Path, vector: Callable[[str, dict[str, Any]], Vector]) -> State:
    """The state in a file.

    Args:
        vector: makes a vector of this worker, of the digest of its space and its arrays by region.
    """
    with np.load(file, allow_pickle=False) as found:
        return [
            {name: _read(value, found, vector) for name, value in one.items() if name[0] != "_"}
            for one in _head(found)["state"]
        ]


def _head(found: Any) -> dict[str, Any]:
    head = json.loads(found["head"].tobytes())
    if not isinstance(head, dict):
        raise ValueError("the head of a checkpoint is a dictionary")
    return head


def _written(value: Any, arrays: dict[str, Any]) -> Any:
    """The value for JSON; its arrays are entered in `arrays`. Floats keep their bits."""
    if isinstance(value, dict):
        return {name: _written(one, arrays) for name, one in value.items()}
    if isinstance(value, list):
        return {"list": [_written(one, arrays) for one in value]}
    if isinstance(value, Vector):
        parts = {name: _entered(array, arrays) for name, array in value.arrays.items()}
        return {"vector": value.space.digest.hex(), "arrays": parts}
    if value is None or type(value) in (bool, int, float, str):
        return value
    kind = "array" if isinstance(value, np.ndarray) else "number"
    return {kind: _entered(np.asarray(value), arrays), "python": isinstance(value, complex)}


def _entered(array: Any, arrays: dict[str, Any]) -> str:
    name = f"a{len(arrays)}"
    arrays[name] = on_host(array)
    return name


def on_host(array: Any) -> Any:
    """The array itself, or a copy in main memory of one on a device."""
    on_device = not isinstance(array, np.ndarray) and hasattr(array, "get")
    return array.get() if on_device else array


def _read(value: Any, found: Any, vector: Callable[[str, dict[str, Any]], Vector]) -> Any:
    """The value that `_written` has made."""
    if not isinstance(value, dict):
        return value
    if "list" in value:
        return [_read(one, found, vector) for one in value["list"]]
    if "vector" in value:
        parts = {name: found[entry] for name, entry in value["arrays"].items()}
        return vector(value["vector"], parts)
    if "array" in value:
        return found[value["array"]]
    number = found[value["number"]][()]
    return number.item() if value["python"] else number
