"""Data movement for torch without linop: each an `autograd.Function` over raw mpi4py, with its
backward pass written by hand. One buffer for a result, and no copy that MPI does not need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from mpi4py import MPI

Tensor = Any
"""torch is not typed here."""
Slices = tuple[slice, ...]


def _memory(x: Tensor) -> Any:
    return x.detach().numpy()


class Nothing(torch.autograd.Function):  # type: ignore[misc]
    """The identity: measures torch's own overhead."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


class Broadcast(torch.autograd.Function):  # type: ignore[misc]
    """Broadcast from rank 0. The others pass an empty tensor.

    Args of `apply`:
        copies: the root's result is a copy; else its argument itself, which torch makes a view:
            autograd forbids to change it in place, on the root alone.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, comm: MPI.Intracomm, shape: Sequence[int], copies: bool = False
    ) -> Tensor:
        ctx.comm, ctx.shape = comm, x.shape
        y = _at_root(x, copies) if comm.rank == 0 else x.new_empty(shape)
        comm.Bcast(_memory(y))
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return _reduced(g.contiguous(), ctx.comm, ctx.shape), None, None, None


class SumReduce(torch.autograd.Function):  # type: ignore[misc]
    """Sum-reduce to rank 0. The result of the others is an empty tensor.

    Args of `apply`:
        copies: the root's gradient is a copy; else that of its result.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: MPI.Intracomm, copies: bool = False) -> Tensor:
        ctx.comm, ctx.shape, ctx.copies = comm, x.shape, copies
        return _reduced(x.contiguous(), comm, (x.shape[0], 0))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        result = _at_root(g, ctx.copies) if ctx.comm.rank == 0 else g.new_empty(ctx.shape)
        ctx.comm.Bcast(_memory(result))
        return result, None, None


def _at_root(x: Tensor, copies: bool) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format) if copies else x.contiguous()


def _reduced(x: Tensor, comm: MPI.Intracomm, elsewhere: Sequence[int]) -> Tensor:
    if comm.rank:
        comm.Reduce(_memory(x), None)
        return x.new_empty(elsewhere)
    y = torch.empty_like(x)
    comm.Reduce(_memory(x), _memory(y))
    return y


class AllReduce(torch.autograd.Function):  # type: ignore[misc]
    """All-reduce; self-adjoint, for ranks that compute different results from their copies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: MPI.Intracomm) -> Tensor:
        ctx.comm = comm
        return _summed(x, comm)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return _summed(g, ctx.comm), None


class Copied(torch.autograd.Function):  # type: ignore[misc]
    """Megatron's f: the identity, and an all-reduce as gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: MPI.Intracomm) -> Tensor:
        ctx.comm = comm
        return x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return _summed(g, ctx.comm), None


class Summed(torch.autograd.Function):  # type: ignore[misc]
    """Megatron's g: an all-reduce, and the identity as gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: MPI.Intracomm) -> Tensor:
        return _summed(x, comm)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g, None


def _summed(x: Tensor, comm: MPI.Intracomm) -> Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    comm.Allreduce(_memory(x), _memory(y))
    return y


class AllGather(torch.autograd.Function):  # type: ignore[misc]
    """All-gather of equal blocks along dimension 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: MPI.Intracomm) -> Tensor:
        ctx.comm = comm
        return _gathered(x, comm)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return _scattered(g, ctx.comm), None


class ReduceScatter(torch.autograd.Function):  # type: ignore[misc]
    """Reduce-scatter into equal blocks along dimension 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: MPI.Intracomm) -> Tensor:
        ctx.comm = comm
        return _scattered(x, comm)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return _gathered(g, ctx.comm), None


def _gathered(x: Tensor, comm: MPI.Intracomm) -> Tensor:
    y = x.new_empty((comm.size * x.shape[0], *x.shape[1:]))
    comm.Allgather(_memory(x.contiguous()), _memory(y))
    return y


def _scattered(x: Tensor, comm: MPI.Intracomm) -> Tensor:
    y = x.new_empty((x.shape[0] // comm.size, *x.shape[1:]))
    comm.Reduce_scatter_block(_memory(x.contiguous()), _memory(y))
    return y


class Replicated(torch.autograd.Function):  # type: ignore[misc]
    """All-gather into a replicated tensor: the gradient is a local slice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: MPI.Intracomm) -> Tensor:
        ctx.block = slice(comm.rank * len(x), (comm.rank + 1) * len(x))
        return _gathered(x, comm)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g[ctx.block], None


class RowsToColumns(torch.autograd.Function):  # type: ignore[misc]
    """Repartition of a matrix from equal blocks of rows to equal blocks of columns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: MPI.Intracomm) -> Tensor:
        ctx.comm = comm
        rows, columns = x.shape
        packed = x.view(rows, comm.size, columns // comm.size).transpose(0, 1).contiguous()
        y = x.new_empty((comm.size * rows, columns // comm.size))
        comm.Alltoall(_memory(packed), _memory(y))
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        rows, columns = g.shape
        received = g.new_empty((ctx.comm.size, rows // ctx.comm.size, columns))
        ctx.comm.Alltoall(_memory(g.contiguous()), _memory(received))
        return received.transpose(0, 1).reshape(rows // ctx.comm.size, -1), None


class Swap(NamedTuple):
    """Exchange with one neighbour, as slices of the extended block: sent, and received."""

    rank: int
    send: Slices
    receive: Slices


class Neighbours:
    """The geometry of a halo exchange on a grid of ranks, for blocks of one shape.

    Args:
        grid: extents of the grid of ranks, in row-major order, over the last dimensions.
        shape: of this rank's block.
        widths: of the halo, along the last dimensions.
        zeros: add boundary padding of zeros along split dimensions.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        grid: Sequence[int],
        shape: Sequence[int],
        widths: Sequence[int],
        zeros: bool = False,
    ) -> None:
        self.comm = comm
        first = len(shape) - len(grid)
        strides = [1] * len(grid)
        for k in reversed(range(len(grid) - 1)):
            strides[k] = strides[k + 1] * grid[k + 1]
        where = [comm.rank // s % n for s, n in zip(strides, grid, strict=True)]
        before, after = [0] * len(shape), [0] * len(shape)
        for k, (at, n, width) in enumerate(zip(where, grid, widths, strict=True)):
            if n > 1:
                before[first + k] = width if at > 0 or zeros else 0
                after[first + k] = width if at < n - 1 or zeros else 0
        rows = list(zip(before, shape, after, strict=True))
        self.shape = tuple(a + n + b for a, n, b in rows)
        inside = [slice(a, a + n) for a, n, b in rows]
        self.core: Slices = tuple(inside)
        self.steps: list[list[Swap]] = []
        self.zeros: list[Slices] = []
        for k, (at, n, width) in enumerate(zip(where, grid, widths, strict=True)):
            if n == 1:
                continue
            d, (a, length, _) = first + k, rows[first + k]
            end = a + length

            def part(lo: int, hi: int, d: int = d) -> Slices:
                return (*inside[:d], slice(lo, hi), *inside[d + 1 :])

            swaps = []
            if at > 0:
                swaps.append(Swap(comm.rank - strides[k], part(a, a + width), part(0, a)))
            elif a:
                self.zeros.append(part(0, a))
            if at < n - 1:
                tail = part(end - width, end), part(end, end + width)
                swaps.append(Swap(comm.rank + strides[k], *tail))
            elif end < self.shape[d]:
                self.zeros.append(part(end, self.shape[d]))
            self.steps.append(swaps)
            inside[d] = slice(None)  # later edges include these halos, for the corners


class Halo(torch.autograd.Function):  # type: ignore[misc]
    """Halo exchange, one dimension after the other, which includes corners. The gradient adds
    halos back to their owners."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, of: Neighbours) -> Tensor:
        ctx.of = of
        y = x.new_empty(of.shape)
        y[of.core].copy_(x)
        for part in of.zeros:
            y[part].zero_()
        for swaps in of.steps:
            pairs = [(swap.rank, y[swap.send], y[swap.receive]) for swap in swaps]
            for _, target, buffer in _exchanged(of.comm, pairs):
                if buffer is not target:
                    target.copy_(buffer)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        of: Neighbours = ctx.of
        g = g.clone()  # autograd owns it
        for swaps in reversed(of.steps):
            pairs = [(swap.rank, g[swap.receive], g[swap.send]) for swap in swaps]
            for _, target, buffer in _exchanged(of.comm, pairs, add=True):
                target += buffer
        return g[of.core], None


def _exchanged(
    comm: MPI.Intracomm, pairs: list[tuple[int, Tensor, Tensor]], add: bool = False
) -> list[tuple[int, Tensor, Tensor]]:
    """Exchange one message with each rank.

    Args:
        pairs: (rank, tensor to send, view to receive into).
        add: receive into a buffer always, because the caller adds it to the view.

    Returns:
        (rank, view, received tensor), where the last may be the view itself.
    """
    received, requests = [], []
    for rank, _, target in pairs:
        direct = target.is_contiguous() and not add
        buffer = target if direct else target.new_empty(target.shape)
        received.append((rank, target, buffer))
        requests.append(comm.Irecv(_memory(buffer), rank))
    requests += [comm.Isend(_memory(source.contiguous()), rank) for rank, source, _ in pairs]
    MPI.Request.Waitall(requests)
    return received
