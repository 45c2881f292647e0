"""Checkpoint folders in the format of torch's distributed checkpointing: each worker writes and
reads its own blocks.

torch.distributed is not initialised: the planner and the writer of torch.distributed.checkpoint are
called here, and workers exchange their plans over linop's control channel.

A save writes files of new names, syncs them, and replaces `.metadata`, which lists them; then it
removes files that are no longer listed. A load reads and checks all blocks before it copies the
first.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StoragePrefix
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from linop.errors import ArgumentError, BackendError
from linop.layers.layer import Tensor
from linop.layers.state.files import (
    View,
    check_archive,
    clear_partial,
    damaged,
    digest_of,
    new_token,
    remove,
    replacing,
    sync_folder,
)
from linop.layers.state.metadata import (
    NAME,
    Chunk,
    Entry,
    Index,
    Location,
    index_of,
    key_of,
    sealed,
)
from linop.layers.state.optimizer_state import Names, Optimized
from linop.layers.state.state import Workers
from linop.layers.state.state_tensors import MODEL, OPTIMIZER, StateTensor, fit

_ANY_SHARD = re.compile(r"__\d+_.*\.distcp")
"""Names of torch's files, and of linop's."""
Box = tuple[tuple[int, int], ...]
"""Start and end in each dimension."""


class _Shard:
    """A `StateTensor` with the methods that torch's planner calls on an item to be written."""

    def __init__(self, workers: Workers, item: StateTensor) -> None:
        self.item, self.worker = item, workers.worker
        self.block = None if item.block is None else item.block.detach()

    def chunk(self) -> ChunkStorageMetadata | None:
        """Position of the block in the global tensor; None if it has no elements, or there is no
        block. A global tensor without elements has empty chunks."""
        item = self.item
        if self.block is None or (not self.block.numel() and 0 not in item.shape):
            return None
        offsets = [s.start or 0 for s in item.of(self.worker)]
        return ChunkStorageMetadata(torch.Size(offsets), self.block.shape)

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        chunk = self.chunk()
        if chunk is None:
            return []
        # Holders of the same block all give an item; torch's global plan keeps one of them.
        properties = TensorProperties.create_from_tensor(self.block)
        data = TensorWriteData(chunk, properties, torch.Size(self.item.shape))
        index = MetadataIndex(name, chunk.offsets)
        return [WriteItem(index, WriteItemType.SHARD, tensor_data=data)]


class _Writing(DefaultSavePlanner):  # type: ignore[misc]  # torch is not typed here
    def lookup_object(self, index: MetadataIndex) -> Any:
        found = self.state_dict[index.fqn]
        return found.block if isinstance(found, _Shard) else found


def save_sharded(workers: Workers, optimized: Optimized | None, path: Path) -> None:
    """Save a model's state, and its optimizers', to a folder.

    Raises:
        LinopError: it cannot be written; on every worker. The checkpoint that was there stays.
    """
    state: dict[str, Any] = {key: _Shard(workers, item) for key, item in workers.tensors.items()}
    if optimized is not None:
        state = {MODEL: state, OPTIMIZER: _optimizer_shards(workers, optimized)}
    workers.same(list(workers.tensors.values()))
    first = workers.worker == 0
    token, is_new = workers.gather_objects((new_token(), not path.exists()))[0]
    workers.each(lambda: path.mkdir(parents=True, exist_ok=True))
    try:
        metadata, written = _write_blocks(workers, state, path, token)
        workers.each(lambda: _publish(path, metadata, written) if first else None)
    except BaseException:
        # Worker 0 alone knows whether it was published; the next save removes leftover files.
        if first and token.encode() not in _bytes_of(path / NAME):
            remove(path.glob(f"__*_{token}_*"))
            if is_new:
                with suppress(OSError):
                    path.rmdir()
        raise
    workers.each(lambda: _settle(path, metadata) if first else None)


def _write_blocks(
    workers: Workers, state: dict[str, Any], path: Path, token: str
) -> tuple[Any, dict[str, tuple[int, str]]]:
    """Write this worker's blocks. Collective.

    Returns:
        Of all workers' items: torch's metadata; and (length in bytes, digest), by `key_of`.
    """
    planner, writer = _Writing(), FileSystemWriter(path)

    def planned() -> Any:
        planner.set_up_planner(state, is_coordinator=workers.worker == 0)
        return planner.create_local_plan()

    def written() -> tuple[Any, dict[str, tuple[int, str]]]:
        storage = _StoragePrefix(f"__{workers.worker}_{token}_")
        mine = planner.finish_plan(replace(plans[workers.worker], storage_data=storage))
        results = writer.write_data(mine, planner).wait()
        return results, dict(_digest_in(path, result.storage_data) for result in results)

    everybodys = workers.gather_objects(workers.each(planned))
    plans, metadata = workers.each(lambda: planner.create_global_plan(everybodys))
    said = workers.gather_objects(workers.each(written))
    metadata.storage_data = {r.index: r.storage_data for results, _ in said for r in results}
    metadata.version, metadata.storage_meta = CURRENT_DCP_VERSION, StorageMeta(save_id=token)
    return metadata, {key: one for _, digests in said for key, one in digests.items()}


def _digest_in(path: Path, info: Any) -> tuple[str, tuple[int, str]]:
    with (path / info.relative_path).open("rb") as file:
        digest = digest_of(View(file, info.offset, info.length))
    return key_of(info.relative_path, info.offset), (info.length, digest)


def _publish(path: Path, metadata: Any, written: Mapping[str, tuple[int, str]]) -> None:
    """Make the written files the folder's checkpoint, atomically: replace its `.metadata`."""
    for info in metadata.storage_data.values():
        file = path / info.relative_path
        if not file.is_file() or file.stat().st_size < info.offset + info.length:
            raise BackendError(
                f"{str(file)!r}, which another worker has written, is not there for worker 0; a "
                f"folder expected that all workers see"
            )
    sync_folder(path)
    with replacing(path / NAME) as file:
        file.write(sealed(metadata, {key: digest for key, (_, digest) in written.items()}))


def _settle(path: Path, metadata: Any) -> None:
    """Sync the published checkpoint, and remove the files of the one that it replaced."""
    sync_folder(path)
    sync_folder(path.parent)
    kept = {info.relative_path for info in metadata.storage_data.values()}
    files = [file for file in path.iterdir() if _ANY_SHARD.fullmatch(file.name)]
    remove(file for file in files if file.name not in kept)
    clear_partial(path / NAME)


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _optimizer_shards(workers: Workers, optimized: Optimized) -> dict[str, Any]:
    """Optimizer state by names of parameters, as torch's get_optimizer_state_dict gives it.
    Collective."""
    state: dict[str, Any] = {}
    kept = optimized.kept()
    workers.same([value for value in kept.values() if isinstance(value, StateTensor)])
    for (key, name), value in kept.items():
        found = _Shard(workers, value) if isinstance(value, StateTensor) else value
        state.setdefault(key, {})[name] = found
    groups = [
        {**hyper, "params": keys}
        for hyper, keys in zip(optimized.hypers, optimized.groups, strict=True)
    ]
    return {"state": state, "param_groups": groups}


class _Folder:
    """A checkpoint to read.

    Raises:
        BackendError: there is none, or its index is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.index: Index = index_of(self._inside(NAME).read_bytes(), path / NAME)

    def _inside(self, name: str) -> Path:
        """Resolved path of a file in the folder.

        Raises:
            BackendError: there is none, or the name or a link leads out of the folder.
        """
        file = (self.path / name).resolve()
        if not file.is_relative_to(self.path.resolve()):
            raise BackendError(f"{name!r} points to a file outside of {str(self.path)!r}: refused")
        if not file.is_file():
            raise BackendError(f"there is no file {name!r} in {str(self.path)!r}")
        return file

    @contextmanager
    def _opened(self, location: Location) -> Iterator[View]:
        """Stream of an item's bytes, which are checked first by digest or CRC."""
        with self._inside(location.file).open("rb") as file:
            view = View(file, location.offset, location.length)
            if location.digest is None:
                check_archive(view, location.file)  # type: ignore[arg-type]
            elif digest_of(view) != location.digest:
                raise BackendError(damaged(self.path / location.file, "its digest is another"))
            view.seek(0)
            yield view

    def object(self, entry: Entry) -> Any:
        """A stored value that is no tensor, of the types that torch loads with `weights_only`."""
        with self._opened(entry.chunks[0].location) as view:
            return torch.load(view, map_location="cpu", weights_only=True)

    def read(self, name: str, target: Tensor, offsets: tuple[int, ...]) -> None:
        """Read a box of a stored tensor.

        Args:
            name: of the tensor.
            target: filled with the box, whose shape it has.
            offsets: of the box in the tensor.

        Raises:
            BackendError: elements are stored twice, or damaged. ArgumentError: some are missing.
        """
        entry = self.index.entries[name]
        boxes = []
        for chunk in entry.chunks:
            box = _overlap(chunk, offsets, tuple(target.shape))
            if box is None:
                continue
            boxes.append(box)
            tensor = self._tensor(chunk, entry.dtype)
            target[_from(box, offsets)].copy_(tensor[_from(box, chunk.offsets)])
        if any(_intersect(a, b) for a, b in combinations(boxes, 2)):
            raise BackendError(f"elements of {name!r} are in the checkpoint twice")
        if sum(prod(end - start for start, end in box) for box in boxes) != target.numel():
            raise ArgumentError(f"elements of {name!r} are missing in the checkpoint")

    def _tensor(self, chunk: Chunk, dtype: Any) -> Tensor:
        with self._opened(chunk.location) as view:
            tensor = torch.load(view, map_location="cpu", weights_only=True)
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


def _intersect(one: Box, other: Box) -> bool:
    return all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(one, other, strict=True))


@dataclass
class _Wanted:
    """Items to read, by their names in the checkpoint.

    Args:
        tensors: of which this worker reads its blocks.
        names: of parameter and value, for those of the items that are optimizer state.
        others: numbers and objects, with the keys that lead to them in the nested state.
    """

    tensors: dict[str, StateTensor]
    names: dict[str, Names] = field(default_factory=dict)
    others: dict[str, tuple[Any, ...]] = field(default_factory=dict)


def load_sharded(workers: Workers, optimized: Optimized | None, path: Path) -> None:
    """Load a model's state, and its optimizers', from a folder.

    Raises:
        LinopError: it cannot be read, is damaged or does not fit; on every worker. Nothing of the
            model is changed then.
    """
    folder = workers.each(lambda: _Folder(path))
    if len(set(workers.gather_objects(folder.index.digest))) > 1:
        workers.refuse(f"workers read different files {str(path / NAME)!r}; one folder expected")
    if not folder.index.sealed and workers.worker == 0:
        warnings.warn(
            f"{str(path)!r} has no digests, so its index cannot be checked; save it again",
            stacklevel=4,
        )
    wanted = workers.each(lambda: _wanted(workers, optimized, folder))
    blocks, objects = workers.each(lambda: _read(workers.worker, folder, wanted))
    install = None if optimized is None else _installer(optimized, wanted, objects)
    workers.materialise()
    for name, item in wanted.tensors.items():
        if name in blocks and name not in wanted.names:
            item.block.detach().copy_(blocks.pop(name))
    if install is not None:
        workers.each(install)


def _wanted(workers: Workers, optimized: Optimized | None, folder: _Folder) -> _Wanted:
    entries, paths = folder.index.entries, folder.index.paths
    both = any(len(path) > 1 and path[0] == OPTIMIZER for path in paths.values())
    if optimized is not None and not both:
        raise ArgumentError(f"{str(folder.path)!r} has no state of an optimizer")
    prefix = (MODEL,) if both else ()
    names = {path[-1]: name for name, path in paths.items() if path[:-1] == prefix}
    items = list(workers.tensors.values())
    # An entry that is no tensor has the shape (), as a number has.
    fit(workers.what, items, {key: entries[name].shape for key, name in names.items()})
    for item in items:
        if entries[names[item.key]].dtype is None:
            raise ArgumentError(f"{item.key!r} is no tensor in the checkpoint")
    wanted = _Wanted({names[item.key]: item for item in items})
    for name, path in paths.items() if optimized is not None else ():
        entry = entries[name]
        if len(path) == 4 and path[:2] == (OPTIMIZER, "state") and entry.shape:
            wanted.names[name] = path[2], path[3]
            wanted.tensors[name] = _target(optimized, path[2], path[3], entry)
        elif len(path) == 4 and path[0] == OPTIMIZER:
            wanted.others[name] = path
    return wanted


def _target(optimized: Any, key: str, name: str, entry: Entry) -> StateTensor:
    if key not in optimized.workers.tensors:
        raise ArgumentError(f"the state of an optimizer for {key!r}, not in the model")
    item: StateTensor = optimized.target(key, name, entry.dtype)
    fit("load", [item], {item.key: entry.shape})
    return item


def _read(worker: int, folder: _Folder, wanted: _Wanted) -> tuple[dict[str, Tensor], Any]:
    """This worker's blocks, in new memory, and the objects, by name."""
    blocks: dict[str, Tensor] = {}
    for name, item in wanted.tensors.items():
        if item.block is not None:
            # An optimizer's block is new already; the model's stays unchanged until all workers
            # have read theirs.
            blocks[name] = (
                item.block
                if name in wanted.names
                else torch.empty_like(item.block, device="cpu", requires_grad=False)
            )
            if blocks[name].numel():
                offsets = tuple(s.start or 0 for s in item.of(worker))
                folder.read(name, blocks[name], offsets)
    objects: dict[str, Any] = {}
    for name in wanted.others:
        entry = folder.index.entries[name]
        if entry.dtype is None:
            objects[name] = folder.object(entry)
        else:
            objects[name] = torch.empty(entry.shape, dtype=entry.dtype)
            folder.read(name, objects[name], (0,) * len(entry.shape))
    return blocks, objects


def _installer(
    optimized: Optimized, wanted: _Wanted, objects: Mapping[str, Any]
) -> Callable[[], None]:
    """Function that loads the state that was read into this worker's optimizer.

    Raises:
        ArgumentError: the state has other groups of parameters; on every worker.
    """
    kept: dict[Names, Any] = {names: wanted.tensors[name] for name, names in wanted.names.items()}
    hypers: list[dict[str, Any]] = [{} for _ in optimized.groups]
    for name, where in wanted.others.items():
        if where[1] == "state":
            kept[where[2], where[3]] = objects[name]
        elif where[2] in range(len(hypers)):
            hypers[where[2]][where[3]] = objects[name]
    said = [hyper.pop("params", None) for hyper in hypers]
    if said != optimized.groups:
        raise ArgumentError(f"load: the state is of groups {said}, not {optimized.groups}")
    return lambda: optimized.install(hypers, kept)
