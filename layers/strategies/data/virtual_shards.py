"""Steps of training whose bits do not depend on the number of workers: the batch is cut into a
fixed number of virtual shards, whichever worker computes them.

A product of matrices of other shapes has other bits, so each shard's gradients are computed by
themselves, of the same shapes on any number of workers. They are added in a binary tree over the
shards. Of 2^k workers each has a complete part of this tree; the sums over workers, in the tree of
``sums="tree"``, are the rest of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from linop.backends.autograd.dtypes import summed_dtype
from linop.errors import ArgumentError, expect
from linop.spaces.partition import Partition
from linop.spaces.region import integer
from linop.strategies.data.batch_norm import SyncBatchNorm
from linop.strategies.data.bucket import Flat
from linop.strategies.data.data_parallel import DataParallel
from linop.strategies.data.operators import replication
from linop.strategies.data.sharded.unsharded import unsharded
from linop.strategies.mesh import Axis

Gradients = list[Tensor | None]


class VirtualShards:
    """A batch in a fixed number of shards, of which each worker of an axis has as many neighbours.

    ``shards.step(model, term, x, target)`` takes the place of forward and backward: it has the same
    bits on 1, 2, 4, … workers, for a model without strategies in one process, `DataParallel`, and
    `fully_shard`, if the workers' backend has ``sums="tree"``. So do the updates that follow. What
    looks at all of the rows at once, as a batch norm in training, sees those of one shard.

    Args:
        axis: such as ``mesh["dp"]``; None: one process.
        shards: their number, a power of two.

    Attributes:
        own: numbers of the shards of this worker.

    Raises:
        ArgumentError: `shards` is no power of two, or the number of workers does not divide it; or
            there are more than two workers, and their sums are no tree.

    Example:
        Two workers, of two shards each, have the bits of one process that computes all four:

        >>> import copy
        >>> net, x = torch.nn.Linear(3, 1), torch.randn(8, 3)
        >>> def term(model, rows):
        ...     return model(rows).square().sum()
        >>> def program(backend):
        ...     dp = strategies.Mesh(dp=2)["dp"]
        ...     mine = strategies.DataParallel(copy.deepcopy(net), dp)
        ...     strategies.VirtualShards(dp, shards=4).step(mine, term, x)
        ...     return mine.module.weight.grad
        >>> found = linop.launch(program, workers=2)
        >>> loss = strategies.VirtualShards(shards=4).step(net, term, x)
        >>> [torch.equal(grad, net.weight.grad) for grad in found]
        [True, True]
    """

    def __init__(self, axis: Axis | None = None, shards: int = 8) -> None:
        self.shards = integer(shards, "VirtualShards: shards")
        size, index = (1, 0) if axis is None else (axis.size, axis.index)
        if self.shards < 1 or self.shards.bit_count() != 1 or self.shards % size:
            raise ArgumentError(
                f"VirtualShards: a power of two that {size} workers divide expected, given "
                f"shards={self.shards}"
            )
        check_tree(axis, "VirtualShards")
        self.axis = axis
        own = self.shards // size
        self.own = range(index * own, (index + 1) * own)
        self._totals: dict[Any, Flat] = {}

    def parts(self, *batch: Tensor) -> list[list[Tensor]]:
        """The rows of this worker's shards, of each tensor of the whole batch.

        Raises:
            ArgumentError: a tensor has fewer rows than there are shards.
        """
        for x in batch:
            if not x.ndim or len(x) < self.shards:
                raise ArgumentError(
                    f"VirtualShards: at least {self.shards} rows expected, given a tensor of shape "
                    f"{tuple(x.shape)}"
                )
        cut = [x.tensor_split(self.shards) for x in batch]
        return [[rows[k] for rows in cut] for k in self.own]

    def step(self, model: Any, term: Callable[..., Tensor], *batch: Tensor) -> Tensor:
        """Forward and backward of all shards. Collective.

        Gradients are in ``grad`` of the parameters afterwards, in place of those before.

        Args:
            model: a module; of `DataParallel` or `fully_shard` over the axis, if there is one.
            term: ``term(model, *rows)``, the loss of the rows of one shard, with one element: a
                term of the sum that the whole loss is. A mean is to be multiplied by the shard's
                part of the rows, ``len(rows) / len(batch)``.
            batch: the whole batch, the same on all workers.

        Returns:
            The loss, the sum of all terms, without graph; the same bits on all workers.

        Raises:
            ArgumentError: the model is of other strategies, or the batch too small; or its bits
                would depend on the number of workers: parameters or sums in half precision,
                gradients divided by that number (reduction="mean"), batch norms over all workers.
        """
        expect("VirtualShards.step: model", model, torch.nn.Module)
        _check_bits(model)
        wide = self.axis is not None and self.axis.size > 1
        whole = self._gradients_apart(model) if wide else nullcontext()
        parts = self.parts(*batch)
        for p in model.parameters():
            if p.requires_grad:
                p.grad = None  # of shards, to which the end of `whole` adds
        gradients, losses = _Tree(), _Tree()
        with whole:
            parameters = [p for p in model.parameters() if p.requires_grad]
            for rows in parts:
                for p in parameters:
                    p.grad = None
                loss = term(model, *rows)
                loss.backward()
                gradients.add([p.grad for p in parameters])
                losses.add([loss.detach().reshape(1)])
            for p, total in zip(parameters, gradients.total(), strict=True):
                p.grad = total
        if isinstance(model, DataParallel) and wide:
            model.reduce_gradients()
        (value,) = losses.total()
        assert value is not None
        return self._summed(value)[0]

    def _gradients_apart(self, model: Any) -> Any:
        """The context in which gradients stay this worker's."""
        sharded = [one for one in model.modules() if getattr(one, "_linop_units", ())]
        if isinstance(model, DataParallel) == bool(sharded):
            raise ArgumentError(
                f"VirtualShards.step: DataParallel(net, axis), or a net of fully_shard, expected, "
                f"given {type(model).__name__}" + (" of both" if sharded else "")
            )
        if getattr(model, "_algorithm", "") == "ring":
            raise ArgumentError(
                "VirtualShards.step: algorithm='ring' of DataParallel adds around the ring, and "
                "not in a tree: leave it out"
            )
        return model.no_sync() if isinstance(model, DataParallel) else unsharded(model)

    def _summed(self, value: Tensor) -> Tensor:
        """The sum over the workers."""
        if self.axis is None or self.axis.size == 1:
            return value
        if value.dtype not in self._totals:
            E = replication(1, value.dtype, Partition((self.axis.size,)))
            self._totals[value.dtype] = Flat(E.H, self.axis.backend, value.dtype)
        total = self._totals[value.dtype](value)
        assert total is not None
        return total


class _Tree:
    """A sum of lists of tensors in a binary tree, of which the complete parts are summed already,
    so that few lists are kept."""

    def __init__(self) -> None:
        self._parts: list[tuple[int, Gradients]] = []

    def add(self, term: Sequence[Tensor | None]) -> None:
        level, total = 0, [*term]
        while self._parts and self._parts[-1][0] == level:
            _, before = self._parts.pop()
            total = [_sum(a, b) for a, b in zip(before, total, strict=True)]
            level += 1
        self._parts.append((level, total))

    def total(self) -> Gradients:
        """The sum of all terms, whose number is a power of two."""
        ((_, total),) = self._parts
        return total


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """The sum of two gradients, of which an absent one is zero, as it is for other workers."""
    if a is None or b is None:
        found = b if a is None else a
        return None if found is None else found + 0
    return a + b


def _check_bits(model: Any) -> None:
    """Check that nothing in a model has other bits on other numbers of workers.

    Raises:
        ArgumentError: something has.
    """
    every = [*model.modules()]
    units = [unit for one in every for unit in getattr(one, "_linop_units", ())]
    trained = {n: p.dtype for n, p in model.named_parameters() if p.requires_grad}
    reductions = [one._options["reduction"] for one in every if isinstance(one, DataParallel)]
    if "mean" in reductions or any(unit.terms > 1 for unit in units):
        found = "reduction='mean', which divides by the number of workers: 'sum' expected"
    elif narrow := [name for name, dtype in trained.items() if summed_dtype(dtype) != dtype]:
        found = (
            f"parameters {narrow[:8]} of {trained[narrow[0]]}, whose sums over workers are rounded "
            f"when they end: float32 or float64 expected"
        )
    elif mixed := [unit.name for unit in units if not unit.is_of_one_dtype]:
        found = (
            f"{mixed[0]} of fully_shard with parameters or sums in another dtype than its shards: "
            f"leave param_dtype and reduce_dtype out"
        )
    elif any(isinstance(one, SyncBatchNorm) and one._axis.size > 1 for one in every):
        found = "batch norms over the rows of all workers: norms of one shard's rows expected"
    else:
        return
    raise ArgumentError(f"VirtualShards.step: bits depend on the number of workers: {found}")


def check_tree(axis: Axis | None, name: str) -> None:
    """Check that sums over the workers of an axis are formed in a tree.

    Raises:
        ArgumentError: they are not.
    """
    if axis is not None and axis.size > 2 and axis.backend.sums != "tree":
        raise ArgumentError(
            f"{name}: a backend with sums='tree' expected, such as of linop.launch(main, workers, "
            f"sums='tree'), or of the variable LINOP_SUMS=tree; this one has "
            f"sums={axis.backend.sums!r}"
        )
