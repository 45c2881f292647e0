"""Agreement of all workers on a model, and on the outcome of what each does with its blocks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor

from linop.backends.together.transport import Item
from linop.errors import ArgumentError, BackendError
from linop.layers.agreement.input_agreement import program_backend
from linop.layers.layer import Layer
from linop.layers.parameters.blocks import plain
from linop.layers.parameters.groups import groups_of
from linop.layers.state.state_tensors import (
    StateTensor,
    beside_tensors,
    lost_on_meta,
    state_tensors,
)

CARRIERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes that elements travel as, by size in bytes."""
Result = TypeVar("Result")


class _Row(NamedTuple):
    """A worker's description of a tensor of its state."""

    key: str
    where: Any
    """The global space; of a tensor that each worker holds whole, its shape."""
    dtype: Any = None
    on_meta: bool = False


class Workers:
    """All workers of a model, with this worker's blocks of its state. Collective.

    Args:
        what: name of the public function that uses it, for errors.
        optimizer: a `ShardedOptimizer`, or another one.

    Raises:
        BackendError: they have different models; on every worker. ArgumentError: no module; or the
            state is more than tensors.
    """

    def __init__(self, what: str, model: Any, optimizer: Any = None) -> None:
        if not isinstance(model, torch.nn.Module):
            raise ArgumentError(
                f"{what}: a torch.nn.Module expected, given {type(model).__name__}; a Pipeline has "
                f"methods for its state: state_dict, load_state_dict, save and load"
            )
        layers = [module for module in model.modules() if isinstance(module, Layer)]
        parts = getattr(optimizer, "parts", None)
        self.what = what
        every = [*model.parameters(), *(() if parts is None else parts.parameters())]
        self.groups = groups_of(every, layers[0].backend if layers else program_backend())
        self.worker = self.groups.worker
        self.backend = self.groups.backends[0]
        self.device = self.backend.arrays.device
        self.tensors = {item.key: item for item in state_tensors(model)}
        self._agree(lost_on_meta(model), beside_tensors(model))

    def _agree(self, lost: list[str], more: list[str]) -> None:
        rows_here = [_described(item) for item in self.tensors.values()]
        said = self.gather_objects((rows_here, lost, more))
        self._lost = sorted({name for _, names, _ in said for name in names})
        if beside := next(filter(None, (found for *_, found in said)), None):
            raise ArgumentError(
                f"{self.what}: the model's state is more than its tensors, which alone are known "
                f"here: {beside[0]}; keep it in a buffer (register_buffer), under its own name"
            )
        first, *others = [rows for rows, *_ in said]
        for worker, rows in enumerate(others, start=1):
            # One error, about the first worker that differs from worker 0.
            for one, other in zip(first, rows, strict=False):
                if one[:2] != other[:2]:
                    self.refuse(
                        f"worker 0 has {one.key!r} where worker {worker} has {other.key!r}, or in "
                        f"other blocks; one model expected on all"
                    )
            if len(rows) != len(first):
                self.refuse(f"worker {worker} has {len(rows)} tensors, worker 0 {len(first)}")
        self._on_meta = []
        for item, *same in zip(self.tensors.values(), first, *others, strict=True):
            kinds = sorted({row.dtype for row in same} - {None}, key=str)
            if len(kinds) > 1:
                self.refuse(f"{item.key!r} is of {' and '.join(map(str, kinds))}")
            item.dtype = kinds[0]
            if any(row.on_meta for row in same):
                self._on_meta.append(item.key)

    def gather_objects(self, mine: Item) -> list[Item]:
        """All workers' messages, by worker: small objects, of classes that
        `linop.backends.together.messages` sends. Collective.

        Raises:
            BackendError: other workers call other functions; on every worker.
        """
        return self.groups.gather_objects(mine, self._doing)

    @property
    def _doing(self) -> str:
        return f"call linop.layers.{self.what}"

    def refuse(self, words: str) -> NoReturn:
        """Raise a BackendError; all workers call it."""
        raise BackendError(f"{self.what}: {words}")

    def need_memory(self) -> None:
        """Check that all blocks have values.

        Raises:
            BackendError: a block is on the meta device, which holds none; on every worker.
        """
        if self._on_meta:
            self.refuse(f"{self._on_meta} on the meta device have no values; load a state first")

    def materialise(self) -> None:
        """Allocate memory for blocks on the meta device.

        Raises:
            BackendError: it cannot be allocated, or a buffer there is in no state; on every worker.
        """
        if self._lost:
            self.refuse(
                f"{self._lost} on the meta device are in no state; make them with "
                f"model.to_empty(device={self.device!r}), and fill them, before"
            )
        if self._on_meta:
            self.each(self._materialise)

    def _materialise(self) -> None:
        for item in self.tensors.values():
            item.materialise(self.device)

    def each(self, work: Callable[[], Result]) -> Result:
        """Result of local work, which may fail on some workers. Collective.

        Raises:
            LinopError: it failed on a worker; on every worker.
        """
        return self.groups.each(work, self.what, self._doing)

    def same(self, items: Sequence[StateTensor]) -> None:
        """Check that tensors that workers hold whole, or the same blocks of, are equal. Collective.

        Raises:
            BackendError: they differ; on every worker.
        """
        groups, mine = self.groups, {}
        for item in items:
            # The holders say how it is cut again: others may have no block of it.
            if item.block is not None and not groups.cover(item.spaces):
                mine[item.key] = groups.place(item.spaces), _digest(item.block)
        said = self.gather_objects(mine)
        for item in items:
            firsts: dict[tuple[int | None, ...], tuple[int, bytes]] = {}
            for worker, digests in enumerate(said):
                if item.key not in digests:
                    continue
                at, its = digests[item.key]
                first, digest = firsts.setdefault(at, (worker, its))
                if digest != its:
                    self.refuse(
                        f"{item.key!r}, of which each worker has the whole, differs between "
                        f"workers {first} and {worker}; give all the same, or hold it in a "
                        f"linop.layers.Layer"
                    )


def _described(item: StateTensor) -> _Row:
    # Of a block of a block: other workers have others in their place.
    where = next(iter(item.spaces.values())).digest if item.spaces else item.shape
    if item.block is None:
        return _Row(item.key, where)
    return _Row(item.key, where, item.block.dtype, item.block.is_meta)


def as_carrier(tensor: Tensor, device: str = "cpu") -> Tensor:
    """The tensor's elements as integers of the same size."""
    x: Tensor = plain(tensor).to(device).resolve_conj().resolve_neg()
    return x.view(CARRIERS.get(x.dtype.itemsize, x.dtype))


def _digest(tensor: Tensor) -> bytes:
    # Of the bits: NaN is equal to itself.
    return hashlib.sha256(as_carrier(tensor).numpy().tobytes()).digest()
