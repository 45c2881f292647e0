"""torch's distributed checkpointing, in which each worker writes and reads its own blocks.

torch.distributed is not initialised: the planners and the storage of torch.distributed.checkpoint
are called here, and workers tell each other their plans.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from linop.errors import ArgumentError
from linop.layers.layer import Tensor
from linop.layers.optimizer_state import Optimized
from linop.layers.parts import MODEL, OPTIMIZER, Part, fit
from linop.layers.state import Workers


class _Shard:
    """A part, as torch's planner asks of what is to be written."""

    def __init__(self, workers: Workers, part: Part) -> None:
        self.part, self.worker = part, workers.worker
        self.block = None if part.block is None else part.block.detach()

    def chunk(self) -> ChunkStorageMetadata | None:
        """Where the block lies in the global tensor; None where there is nothing in it."""
        part = self.part
        if self.block is None or (not self.block.numel() and 0 not in part.shape):
            return None
        offsets = [s.start or 0 for s in part.of(self.worker)]
        return ChunkStorageMetadata(torch.Size(offsets), self.block.shape)

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        chunk = self.chunk()
        if chunk is None:
            return []
        # Those who hold the same block write one item, of which torch keeps one.
        properties = TensorProperties.create_from_tensor(self.block)
        data = TensorWriteData(chunk, properties, torch.Size(self.part.shape))
        index = MetadataIndex(name, chunk.offsets)
        return [WriteItem(index, WriteItemType.SHARD, tensor_data=data)]


class _Writing(DefaultSavePlanner):  # type: ignore[misc]  # torch is not typed here
    def lookup_object(self, index: MetadataIndex) -> Any:
        found = self.state_dict[index.fqn]
        return found.block if isinstance(found, _Shard) else found


class _Reading(DefaultLoadPlanner):  # type: ignore[misc]
    """Reads into tensors, by name; what is no tensor, it adds to them."""

    def __init__(self, tensors: dict[str, Any]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.state_dict = tensors

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn]


def save_parts(workers: Workers, optimized: Optimized | None, path: Path) -> None:
    """Save a model's state, and its optimizers', to a folder."""
    state: dict[str, Any] = {key: _Shard(workers, part) for key, part in workers.parts.items()}
    if optimized is not None:
        state = {MODEL: state, OPTIMIZER: _optimizer_shards(workers, optimized)}
    workers.same(list(workers.parts.values()))
    first = workers.worker == 0
    planner, writer = _Writing(), FileSystemWriter(path)

    def planned() -> Any:
        if first:
            # Until the new one is whole, there is none.
            (path / ".metadata").unlink(missing_ok=True)
        planner.set_up_planner(state, writer.storage_meta(), first)
        writer.set_up_storage_writer(first)
        return planner.create_local_plan()

    plan = workers.each(planned)
    plan = workers.each(lambda: writer.prepare_local_plan(plan))
    plans, metadata = planner.create_global_plan(workers.meeting.told(plan))
    mine = planner.finish_plan(writer.prepare_global_plan(plans)[workers.worker])
    results = workers.meeting.told(workers.each(lambda: writer.write_data(mine, planner).wait()))
    workers.each(lambda: writer.finish(metadata, results) if first else None)


def _optimizer_shards(workers: Workers, optimized: Optimized) -> dict[str, Any]:
    """As torch's get_optimizer_state_dict has it: by names of parameters."""
    state: dict[str, Any] = {}
    kept = optimized.kept()
    workers.same([value for value in kept.values() if isinstance(value, Part)])
    for (key, name), value in kept.items():
        found = _Shard(workers, value) if isinstance(value, Part) else value
        state.setdefault(key, {})[name] = found
    groups = [
        {**hyper, "params": keys}
        for hyper, keys in zip(optimized.hypers, optimized.groups, strict=True)
    ]
    return {"state": state, "param_groups": groups}


def load_parts(workers: Workers, optimized: Optimized | None, path: Path) -> None:
    """Load a model's state, and its optimizers', from a folder.

    Raises:
        LinopError: it cannot be read, or does not fit; on every worker.
    """
    reader = FileSystemReader(path)
    metadata = workers.each(reader.read_metadata)
    reader.set_up_storage_reader(metadata, workers.worker == 0)
    sizes = {name: _size(entry) for name, entry in metadata.state_dict_metadata.items()}
    at = metadata.planner_data or {name: (name,) for name in sizes}
    both = any(len(path) > 1 and path[0] == OPTIMIZER for path in at.values())
    if optimized is not None and not both:
        raise ArgumentError(f"load: {str(path)!r} has no state of an optimizer")
    prefix = (MODEL,) if both else ()
    names = {at[name][-1]: name for name in sizes if at[name][:-1] == prefix}
    parts = list(workers.parts.values())
    fit("load", parts, {key: sizes[name] for key, name in names.items()})
    read = {names[part.key]: part for part in parts}
    kept, others = {}, {}
    if optimized is not None:
        for name, size in sizes.items():
            where = at[name]
            if where[:2] == (OPTIMIZER, "state") and size:
                dtype = metadata.state_dict_metadata[name].properties.dtype
                kept[where[2:]] = read[name] = _target(optimized, where[2], where[3], dtype, size)
            elif where[0] == OPTIMIZER:
                others[where] = name
    found = workers.each(lambda: _read(workers, reader, metadata, read, list(others.values())))
    if optimized is not None:
        hypers: list[dict[str, Any]] = [{} for _ in optimized.groups]
        for where, name in others.items():
            if where[1] == "state":
                kept[where[2:]] = found[name]
            elif len(where) == 4 and where[2] < len(hypers):
                hypers[where[2]][where[3]] = found[name]
        said = [hyper.pop("params", None) for hyper in hypers]
        if said != optimized.groups:
            raise ArgumentError(f"load: the state is of groups {said}, not {optimized.groups}")
        workers.each(lambda: optimized.install(hypers, kept))


def _target(optimized: Optimized, key: str, name: str, dtype: Any, size: tuple[int, ...]) -> Part:
    if key not in optimized.workers.parts:
        raise ArgumentError(f"load: the state of an optimizer for {key!r}, not in the model")
    part = optimized.target(key, name, dtype)
    fit("load", [part], {part.key: size})
    return part


def _size(entry: Any) -> tuple[int, ...]:
    """The shape of a tensor in a checkpoint; () for what is none."""
    return tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else ()


def _read(
    workers: Workers,
    reader: FileSystemReader,
    metadata: Any,
    parts: Mapping[str, Part],
    others: Sequence[str],
) -> dict[str, Any]:
    """Read blocks into parts, and give what is in others, which are numbers."""
    items: list[ReadItem] = []
    into: dict[str, Any] = {}
    for name, part in parts.items():
        shard = _Shard(workers, part)
        chunk = shard.chunk()
        if chunk is None:
            continue
        entry = metadata.state_dict_metadata[name]
        found = create_read_items_for_chunk_list(name, entry, [chunk])
        if sum(prod(item.lengths) for item in found) != prod(chunk.sizes):
            raise ArgumentError(f"elements of {part.key!r} are missing in the checkpoint")
        into[name] = shard.block
        items += found
    for name in others:
        entry = metadata.state_dict_metadata[name]
        if isinstance(entry, TensorStorageMetadata):
            into[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
            items += create_read_items_for_chunk_list(name, entry, entry.chunks)
        else:
            index, zero, one = MetadataIndex(name), torch.Size((0,)), torch.Size((1,))
            items.append(ReadItem(LoadItemType.BYTE_IO, index, zero, index, zero, one))
    with torch.no_grad():
        reader.read_data(LoadPlan(items), _Reading(into)).wait()
    return into
