"""Loading a checkpoint folder in the format of torch's distributed checkpointing: each worker reads
its own blocks. All blocks are read and checked before the first is copied.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from linop.errors import ArgumentError, BackendError
from linop.layers.parameters.blocks import plain
from linop.layers.state.files import View, check_archive, damaged, digest_of
from linop.layers.state.limits import Limits, bytes_of
from linop.layers.state.metadata import NAME, Chunk, Index, Location, index_of
from linop.layers.state.optimizer_state import Names, Optimized
from linop.layers.state.reading import inside, loaded, regular
from linop.layers.state.state_tensors import (
    MODEL,
    OPTIMIZER,
    StateTensor,
    check_kinds,
    check_range,
    fit,
)
from linop.layers.state.workers import Workers

Box = tuple[tuple[int, int], ...]
"""Start and end in each dimension."""


class _Folder:
    """A checkpoint to read.

    Args:
        wanted: bytes of the model's tensors, which limit those that are read.

    Raises:
        BackendError: there is none, or its index is damaged.
    """

    def __init__(self, path: Path, wanted: int) -> None:
        self.path = path
        self._limits = Limits(wanted)
        with regular(self._inside(NAME)) as file:
            self._limits.take(os.fstat(file.fileno()).st_size, str(path / NAME))
            data = file.read()
        self.index: Index = index_of(data, path / NAME, self._limits)

    def _inside(self, name: str) -> Path:
        """Resolved path of a file in the folder.

        Raises:
            BackendError: there is none, or the name or a link leads out of the folder.
        """
        file = inside(self.path, name)
        if not file.is_file():
            raise BackendError(f"there is no file {name!r} in {str(self.path)!r}")
        return file

    def _loaded(self, location: Location) -> Any:
        """A stored item, which is checked first by digest or CRC."""
        name, check_time = str(self.path / location.file), self._limits.check_time
        with regular(self._inside(location.file)) as file:
            self._limits.take(location.length, name)
            view = View(file, location.offset, location.length)
            if location.digest is None:
                check_archive(view, location.file, check_time)  # type: ignore[arg-type]
            elif digest_of(view, check_time) != location.digest:
                raise BackendError(damaged(self.path / location.file, "its digest is another"))
            view.seek(0)
            return loaded(view, name, self._limits)

    def value(self, name: str) -> Any:
        """A whole tensor, or another value, of the types that torch loads with `weights_only`."""
        entry = self.index.entries[name]
        if entry.dtype is None:
            return self._loaded(entry.chunks[0].location)
        self._limits.take(math.prod(entry.shape) * entry.dtype.itemsize, f"{name!r}")
        whole = torch.empty(entry.shape, dtype=entry.dtype)
        self.read(name, whole, (0,) * whole.ndim)
        return whole

    def read(self, name: str, target: Tensor, offsets: tuple[int, ...]) -> None:
        """Read a box of a stored tensor.

        Args:
            name: of the tensor.
            target: filled with the box, whose shape it has.
            offsets: of the box in the tensor.

        Raises:
            BackendError: elements are stored twice, or damaged. ArgumentError: some are missing,
                or beyond the range of the target's dtype.
        """
        entry = self.index.entries[name]
        found = [(chunk, _overlap(chunk, offsets, tuple(target.shape))) for chunk in entry.chunks]
        boxes = [(chunk, box) for chunk, box in found if box is not None]
        self._check_cover(name, [_from(box, offsets) for _, box in boxes], target)
        for chunk, box in boxes:
            tensor = self._tensor(chunk, entry.dtype)
            part = tensor[_from(box, chunk.offsets)]
            check_range("load", name, part, target.dtype)
            target[_from(box, offsets)].copy_(part)

    def _check_cover(self, name: str, boxes: Sequence[tuple[slice, ...]], target: Tensor) -> None:
        """Check that boxes have each element of a target once, in time proportional to these."""
        count, seen = 0, torch.zeros(target.shape, dtype=torch.bool)
        for box in boxes:
            self._limits.check_time()
            part = seen[box]
            count += part.numel()
            if bool(part.any()):
                raise BackendError(f"elements of {name!r} are in the checkpoint twice")
            part.fill_(True)
        if count != target.numel():
            raise ArgumentError(f"elements of {name!r} are missing in the checkpoint")

    def _tensor(self, chunk: Chunk, dtype: Any) -> Tensor:
        tensor = self._loaded(chunk.location)
        found = tuple(getattr(tensor, a, None) for a in ("shape", "dtype", "layout"))
        if not isinstance(tensor, torch.Tensor) or found != (chunk.sizes, dtype, torch.strided):
            where, wanted = chunk.location.file, (chunk.sizes, dtype)
            raise BackendError(damaged(self.path / where, f"{found} in it; {wanted} expected"))
        return tensor


def _overlap(chunk: Chunk, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Box | None:
    """Intersection of a chunk with a block of given offsets and sizes; None if it is empty."""
    rows = zip(chunk.offsets, chunk.sizes, offsets, sizes, strict=True)
    box = tuple((max(a, b), min(a + n, b + m)) for a, n, b, m in rows)
    return box if all(start < end for start, end in box) else None


def _from(box: Box, offsets: tuple[int, ...]) -> tuple[slice, ...]:
    """Slices of a box in a block that begins at the offsets."""
    return tuple(slice(a - o, b - o) for (a, b), o in zip(box, offsets, strict=True))


def load_sharded(workers: Workers, optimized: Optimized | None, path: Path) -> None:
    """Load a model's state, and its optimizers', from a folder.

    Raises:
        LinopError: it cannot be read, is damaged or does not fit; on every worker. Nothing of the
            model is changed then.
    """
    folder = workers.each(lambda: _Folder(path, bytes_of(workers.tensors.values())))
    if len(set(workers.gather_objects(folder.index.digest))) > 1:
        workers.refuse(f"workers read different files {str(path / NAME)!r}; one folder expected")
    if not folder.index.sealed and workers.worker == 0:
        warnings.warn(
            f"{str(path)!r} has no digests, so its index cannot be checked; save it again",
            stacklevel=4,
        )
    both = any(len(path) > 1 and path[0] == OPTIMIZER for path in folder.index.paths.values())
    if optimized is not None and not both:
        raise ArgumentError(f"load: {str(path)!r} has no state of an optimizer")
    blocks = workers.each(lambda: _blocks(workers, folder, (MODEL,) if both else ()))
    staged = workers.each(lambda: None if optimized is None else _staged(optimized, folder))
    if optimized is not None and staged is not None:
        workers.each(lambda: optimized.check(*staged))
    workers.materialise()
    for key, block in blocks.items():
        plain(workers.tensors[key].block).copy_(block)
    if optimized is not None and staged is not None:
        workers.each(lambda: optimized.install(*staged))


def _blocks(workers: Workers, folder: _Folder, prefix: tuple[str, ...]) -> dict[str, Tensor]:
    """This worker's blocks of the model's state, in new memory, by key.

    Args:
        prefix: keys that lead to the model's state.
    """
    entries, items = folder.index.entries, list(workers.tensors.values())
    paths = folder.index.paths.items()
    names = {path[-1]: name for name, path in paths if path[:-1] == prefix}
    # An entry that is no tensor has the shape (), as a number has.
    fit(workers.what, items, {key: entries[name].shape for key, name in names.items()})
    for item in items:
        if entries[names[item.key]].dtype is None:
            raise ArgumentError(f"{item.key!r} is no tensor in the checkpoint")
    check_kinds(workers.what, items, {key: entries[name].dtype for key, name in names.items()})
    blocks = {}
    for item in items:
        if item.block is not None:
            block = torch.empty_like(item.block, device="cpu", requires_grad=False)
            _read(folder, names[item.key], item, block)
            blocks[item.key] = block
    return blocks


def _staged(optimized: Optimized, folder: _Folder) -> tuple[list[dict[str, Any]], dict[Names, Any]]:
    """This worker's share of the optimizer's state, in new memory, for `Optimized.install`."""
    kept: dict[Names, Any] = {}
    hypers: list[dict[str, Any]] = [{} for _ in optimized.groups]
    for name, path in folder.index.paths.items():
        if len(path) != 4 or path[0] != OPTIMIZER:
            continue
        _, kind, owner, what = path
        entry = folder.index.entries[name]
        if kind == "state" and entry.shape:
            if owner not in optimized.tensors:
                raise ArgumentError(f"the state of an optimizer for {owner!r}, not in the model")
            kept[owner, what] = item = optimized.target(owner, what, entry.dtype)
            fit("load", [item], {item.key: entry.shape})
            if item.block is not None:
                _read(folder, name, item, item.block)
            continue
        value = folder.value(name)
        if kind == "state":
            kept[owner, what] = value
        elif owner in range(len(hypers)):
            hypers[owner][what] = value
    said = [hyper.pop("params", None) for hyper in hypers]
    if said != optimized.groups:
        raise ArgumentError(f"the state is of groups {said}, not {optimized.groups}")
    return hypers, kept


def _read(folder: _Folder, name: str, item: StateTensor, block: Tensor) -> None:
    """Fill this worker's block from a stored tensor."""
    for there, here in item.pieces:
        folder.read(name, block[here], tuple(s.start or 0 for s in there))
