"""Parts of global batches: a sampler, and a loader, that give each worker its rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    default_collate,
)

from linop.errors import ArgumentError, expect
from linop.spaces.partition import balanced
from linop.spaces.region import integer
from linop.strategies.mesh import Axis


class Parts(Sampler[list[int]]):
    """Batch sampler of this worker's rows of each global batch: balanced, consecutive parts, of
    which the first ones are one row longer. All workers have as many batches, and each row of the
    data is in one part of one batch: none is repeated, as torch's DistributedSampler does, and none
    left out. A worker's part of a last batch may be empty.

    Use it as ``DataLoader(data, batch_sampler=Parts(data, axis, batch_size=64, shuffle=True))``;
    where parts may be empty, `loader` collates them.

    Args:
        data: with a length, the same on all workers; or a sampler of torch that gives the same
            rows on all of them.
        axis: such as ``mesh["dp"]``.
        batch_size: rows of a global batch, which all workers share.
        shuffle: a permutation for each epoch, of the seed and the number of the epoch.
        seed: the same on all workers.
        drop_last: leave out a last batch that is smaller.

    Attributes:
        epoch: the number of the next pass over the data, which counts up as a pass begins. So all
            workers begin the same passes: one that looks at a batch alone, as in
            ``next(iter(batches))``, has other permutations from then on, and rows come twice or
            never; after that let `set_epoch` set it on all workers.

    Raises:
        ArgumentError: `batch_size` is below 1, or `data` has no length.

    Example:
        >>> def program(backend):
        ...     return [*strategies.Parts(range(10), strategies.Mesh(dp=2)["dp"], batch_size=5)]
        >>> linop.launch(program, workers=2)
        [[[0, 1, 2], [5, 6, 7]], [[3, 4], [8, 9]]]
    """

    def __init__(
        self,
        data: Any,
        axis: Axis,
        *,
        batch_size: int,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        self._axis = expect("Parts: axis", axis, Axis)
        if not hasattr(data, "__len__"):
            raise ArgumentError(
                f"Parts: data with a length expected, given {type(data).__name__}; of a stream, "
                f"let each worker read its own, in linop.strategies.equal_batches"
            )
        if integer(batch_size, "Parts: batch_size") < 1:
            raise ArgumentError(f"Parts: batch_size={batch_size}; at least 1 expected")
        self._generator = torch.Generator()
        self._seed, self.epoch = seed, 0
        sampler: Any = data
        if not isinstance(data, Sampler):
            sampler = SequentialSampler(data)
            if shuffle:
                sampler = RandomSampler(data, generator=self._generator)
        elif shuffle:
            raise ArgumentError("Parts: shuffle=True with a sampler, which has an order of its own")
        self._batches = BatchSampler(sampler, batch_size, drop_last)

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be that of an epoch, as after a checkpoint."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[int]]:
        self._generator.manual_seed(self._seed + self.epoch)
        self.epoch += 1
        for batch in self._batches:
            sizes = balanced(len(batch), self._axis.size)
            start = sum(sizes[: self._axis.index])
            yield batch[start : start + sizes[self._axis.index]]


def loader(
    data: Any,
    axis: Axis,
    *,
    batch_size: int,
    shuffle: bool = False,
    seed: int = 0,
    drop_last: bool = False,
    **options: Any,
) -> DataLoader[Any]:
    """A DataLoader of torch of this worker's rows of each global batch (`Parts`, whose arguments
    these are).

    An empty part is a batch of no rows, of the shapes and dtypes of others: forward and backward of
    it are those of the other workers, and its gradients are zeros. All workers begin the same
    passes (`Parts.epoch`).

    Args:
        data: a dataset with indices.
        options: of DataLoader, such as ``num_workers`` and ``collate_fn``, which may use a worker's
            random numbers, but not those of others.

    Raises:
        ArgumentError: an argument is invalid; or parts may be empty, and batches are not of tensors
            with rows in their first dimension (in tuples, lists, dicts or named tuples). Where they
            may be, the first row is read for that.

    Example:
        The last batch has one row: the second worker's part of it is empty.

        >>> data = torch.utils.data.TensorDataset(torch.arange(5))
        >>> def program(backend):
        ...     batches = strategies.loader(data, strategies.Mesh(dp=2)["dp"], batch_size=4)
        ...     return [rows.tolist() for (rows,) in batches]
        >>> linop.launch(program, workers=2)
        [[[0, 1], [4]], [[2, 3], []]]
    """
    for name in ("sampler", "batch_sampler"):
        if name in options:
            raise ArgumentError(f"loader: {name}= is a linop.strategies.Parts; give that its data")
    parts = Parts(
        data, axis, batch_size=batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last
    )
    given = options.pop("collate_fn", None) or default_collate
    _check_empty(given, data, axis.size, batch_size, drop_last)
    collate = partial(_collated, given, data)
    return DataLoader(data, batch_sampler=parts, collate_fn=collate, **options)


def _check_empty(collate: Any, data: Any, workers: int, batch_size: int, drop_last: bool) -> None:
    """Check that there are batches of no rows, if there may be empty parts; on every worker, of
    which those without a row would find out alone."""
    last = 0 if drop_last else len(data) % batch_size
    full = batch_size if len(data) >= batch_size else 0
    fewest = min(filter(None, (last, full)), default=workers)
    if fewest >= workers:
        return
    for rows in (1, 2):
        for leaf in tree_leaves(collate([data[0] for _ in range(rows)])):
            if leaf is None or (isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == rows):
                continue
            is_tensor = isinstance(leaf, Tensor)
            what = f"a tensor of shape {tuple(leaf.shape)}" if is_tensor else type(leaf).__name__
            cure = "drop_last=True" if batch_size >= workers else f"batch_size={workers} or more"
            raise ArgumentError(
                f"loader: a batch of {_rows(fewest)} leaves some of {workers} workers without a "
                f"row; collate_fn gives {what} for {_rows(rows)}; tensors with rows in their first "
                f"dimension expected, of which there are some without rows. Or give {cure}, or a "
                f"DataLoader of batch_sampler=Parts(...) a collate_fn that takes an empty list"
            )


def _rows(count: int) -> str:
    return f"{count} row{'s' if count > 1 else ''}"


def _collated(collate: Any, data: Any, rows: Sequence[Any]) -> Any:
    """A batch; of no rows, that of the first one without it."""
    if rows:
        return collate(rows)
    return tree_map_only(Tensor, lambda x: x[:0], collate([data[0]]))
