"""Saving a checkpoint folder in the format of torch's distributed checkpointing: each worker writes
its own blocks.

torch.distributed is not initialised: the planner and the writer of torch.distributed.checkpoint are
called here, and workers exchange their plans over linop's control channel. Files of new names are
written and synced; then `.metadata`, which lists them, is replaced, and those are removed that are
neither listed nor of another save that goes on.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    CURRENT_DCP_VERSION,
    FileSystemWriter,
    _StorageInfo,
    _StoragePrefix,
)
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

from linop.backends.together.messages import allow
from linop.errors import BackendError
from linop.layers.parameters.blocks import plain
from linop.layers.state.files import (
    View,
    clear_partial,
    digest_of,
    entries,
    new_token,
    remove,
    replacing,
    sync_folder,
    take_after,
)
from linop.layers.state.metadata import NAME, key_of, sealed
from linop.layers.state.optimizer_state import Optimized
from linop.layers.state.reading import inside, regular
from linop.layers.state.state_tensors import MODEL, OPTIMIZER, StateTensor
from linop.layers.state.workers import Workers

# Records that workers send each other.
allow(SavePlan, WriteItem, WriteItemType, TensorWriteData, BytesIOWriteData, WriteResult)
allow(Metadata, MetadataIndex, StorageMeta, TensorProperties, ChunkStorageMetadata)
allow(TensorStorageMetadata, BytesStorageMetadata, _StorageInfo, _StoragePrefix)

_ANY_SHARD = re.compile(r"__\d+_.*\.distcp")
"""Names of torch's files, and of linop's."""


class _Shard:
    """A `StateTensor` with the methods that torch's planner calls on an item to be written."""

    def __init__(self, item: StateTensor, copies: bool) -> None:
        self.item = item
        self.block = None if item.block is None else plain(item.block).detach()
        if copies and self.block is not None:
            self.block = self.block.clone()

    def chunks(self) -> list[tuple[ChunkStorageMetadata, torch.Tensor]]:
        """Boxes of the global tensor that the block has, each with its elements; none if it has no
        elements, or there is no block. A global tensor without elements has empty chunks."""
        item = self.item
        if self.block is None or (not self.block.numel() and 0 not in item.shape):
            return []
        found = []
        for there, here in item.pieces:
            part = self.block[here]
            offsets = torch.Size([s.start or 0 for s in there])
            found.append((ChunkStorageMetadata(offsets, part.shape), part))
        return found

    def part(self, index: MetadataIndex) -> torch.Tensor:
        """The elements of a box."""
        return next(part for chunk, part in self.chunks() if chunk.offsets == index.offset)

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        # Holders of the same block all give an item; torch's global plan keeps one of them.
        items = []
        for chunk, part in self.chunks():
            properties = TensorProperties.create_from_tensor(part)
            data = TensorWriteData(chunk, properties, torch.Size(self.item.shape))
            index = MetadataIndex(name, chunk.offsets)
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return items


class _Writing(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Any:
        found = self.state_dict[index.fqn]
        return found.part(index) if isinstance(found, _Shard) else found


def save_sharded(
    workers: Workers, optimized: Optimized | None, path: Path, copies: bool = False
) -> Generator[Callable[[], Any], Callable[[], Any], None]:
    """Save a model's state, and its optimizers', to a folder: what this worker has to write is
    yielded, and a function is sent back that gives its result, or raises.

    Args:
        copies: write copies, so that values may change meanwhile.

    Raises:
        LinopError: it cannot be written; on every worker. The checkpoint that was there stays.
    """
    state: dict[str, Any] = {key: _Shard(item, copies) for key, item in workers.tensors.items()}
    if optimized is not None:
        state = {MODEL: state, OPTIMIZER: _optimizer_shards(workers, optimized, copies)}
    workers.same(list(workers.tensors.values()))
    first = workers.worker == 0
    token, is_new = workers.gather_objects((new_token(), not os.path.exists(path)))[0]
    try:
        with ExitStack() as saving:

            def begin() -> IO[bytes] | None:
                path.mkdir(parents=True, exist_ok=True)
                index = inside(path, NAME)  # as `load` expects it
                return saving.enter_context(replacing(index, token)) if first else None

            def publish() -> None:
                if part is not None:
                    _publish(path, metadata, written, part)
                    saving.close()

            # Its lock guards the blocks' files, which have its token: before the first of them.
            part = workers.each(begin)
            metadata, written = yield from _write_blocks(workers, state, path, token)
            workers.each(publish)
    except BaseException:
        # Worker 0 alone knows whether it was published; the next save removes leftover files.
        if first and token.encode() not in _bytes_of(path / NAME):
            remove(path.glob(f"__*_{token}_*"))
            if is_new:
                with suppress(OSError):
                    path.rmdir()
        raise
    workers.each(lambda: _settle(path) if first else None)


def _write_blocks(
    workers: Workers, state: dict[str, Any], path: Path, token: str
) -> Generator[Callable[[], Any], Callable[[], Any], tuple[Any, dict[str, tuple[int, str]]]]:
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
        for name in {result.storage_data.relative_path for result in results}:
            take_after(path / name, path / NAME)  # who may read the one may read the others
        return results, dict(_digest_in(path, result.storage_data) for result in results)

    everybodys = workers.gather_objects(workers.each(planned))
    plans, metadata = workers.each(lambda: planner.create_global_plan(everybodys))
    done = yield written
    said = workers.gather_objects(workers.each(done))
    metadata.storage_data = {r.index: r.storage_data for results, _ in said for r in results}
    metadata.version, metadata.storage_meta = CURRENT_DCP_VERSION, StorageMeta(save_id=token)
    return metadata, {key: one for _, digests in said for key, one in digests.items()}


def _digest_in(path: Path, info: Any) -> tuple[str, tuple[int, str]]:
    with (path / info.relative_path).open("rb") as file:
        digest = digest_of(View(file, info.offset, info.length))
    return key_of(info.relative_path, info.offset), (info.length, digest)


def _publish(
    path: Path, metadata: Any, written: Mapping[str, tuple[int, str]], part: IO[bytes]
) -> None:
    """Check the written files, and list them in what is to be the folder's `.metadata`."""
    for info in metadata.storage_data.values():
        file = path / info.relative_path
        if not file.is_file() or file.stat().st_size < info.offset + info.length:
            raise BackendError(
                f"{str(file)!r}, which another worker has written, is not there for worker 0; a "
                f"folder expected that all workers see"
            )
    sync_folder(path)
    part.write(sealed(metadata, {key: digest for key, (_, digest) in written.items()}))


def _settle(path: Path) -> None:
    """Sync the published checkpoint, and remove the files of the one that it replaced."""
    sync_folder(path)
    sync_folder(path.parent)
    # In this order: a save to the folder that ends meanwhile is in one of the last two.
    files = [file for file in entries(path) if _ANY_SHARD.fullmatch(file.name)]
    going_on = clear_partial(path / NAME)
    listed = _bytes_of(path / NAME)
    kept = {f for f in files if f.name.encode() in listed or any(t in f.name for t in going_on)}
    if listed:
        remove(file for file in files if file not in kept)


def _bytes_of(path: Path) -> bytes:
    try:
        with regular(path) as file:
            return file.read()
    except (OSError, BackendError):
        return b""


def _optimizer_shards(workers: Workers, optimized: Optimized, copies: bool) -> dict[str, Any]:
    """Optimizer state by names of parameters, as torch's get_optimizer_state_dict gives it.
    Collective."""
    state: dict[str, Any] = {}
    kept = optimized.kept()
    workers.same([value for value in kept.values() if isinstance(value, StateTensor)])
    for (key, name), value in kept.items():
        found = _Shard(value, copies) if isinstance(value, StateTensor) else value
        state.setdefault(key, {})[name] = found
    groups = [
        {**hyper, "params": keys}
        for hyper, keys in zip(optimized.hypers, optimized.groups, strict=True)
    ]
    return {"state": state, "param_groups": groups}
