"""Parallel torch programs over mpi4py that send, gather and exchange, each right and, with
``CASE=wrong``, with one fault, for tests of `check_mpi`. A program is a class:
``exchanges.py:HaloDoesNotAdd``."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from mpi4py import MPI
from mpi_common import WRONG, Copy, DataParallel, Family, Function, Net, comm
from torch import nn


class Smooth(nn.Module):
    """A convolution along the columns of a field."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(1, 3)
        self.kernel = nn.Parameter(torch.randn(3, 3, 3))
        self.out = nn.Linear(3, 1)

    def padded(self, x: Any) -> Any:
        return nn.functional.pad(x, (1, 1))

    def forward(self, x: Any) -> Any:
        x = torch.tanh(self.lift(x)).T[None]
        return self.out(nn.functional.conv1d(self.padded(x), self.kernel)[0].T)


class Halo(Function):
    """One column of each neighbour on both sides."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        given = x.detach().numpy()
        field = np.zeros((*given.shape[:-1], given.shape[-1] + 2))
        field[..., 1:-1] = given
        left = comm.rank - 1 if comm.rank else MPI.PROC_NULL
        right = comm.rank + 1 if comm.rank + 1 < comm.size else MPI.PROC_NULL
        edge = np.zeros(given.shape[:-1])
        comm.Sendrecv(np.ascontiguousarray(given[..., -1]), right, 0, edge, left, 0)
        field[..., 0] = edge
        edge = np.zeros(given.shape[:-1])
        comm.Sendrecv(np.ascontiguousarray(given[..., 0]), left, 1, edge, right, 1)
        field[..., -1] = edge
        return torch.from_numpy(field)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        given = grad.numpy()
        field = given[..., 1:-1].copy()
        left = comm.rank - 1 if comm.rank else MPI.PROC_NULL
        right = comm.rank + 1 if comm.rank + 1 < comm.size else MPI.PROC_NULL
        edge = np.zeros(field.shape[:-1])
        comm.Sendrecv(np.ascontiguousarray(given[..., 0]), left, 0, edge, right, 0)
        if right != MPI.PROC_NULL:
            if WRONG:
                field[..., -1] = edge
            else:
                field[..., -1] += edge
        edge = np.zeros(field.shape[:-1])
        comm.Sendrecv(np.ascontiguousarray(given[..., -1]), right, 1, edge, left, 1)
        if left != MPI.PROC_NULL:
            if WRONG:
                field[..., 0] = edge
            else:
                field[..., 0] += edge
        return torch.from_numpy(field)


class SmoothParts(Smooth):
    def padded(self, x: Any) -> Any:
        return Halo.apply(x)


class HaloDoesNotAdd(DataParallel):
    """The gradient of a halo replaces that of the edge."""

    def twin(self) -> Any:
        torch.manual_seed(4)
        return Smooth()

    def parallel(self) -> Any:
        return SmoothParts()

    def batch(self) -> Any:
        g = torch.Generator().manual_seed(2)
        return torch.randn(12, 1, generator=g), torch.randn(12, 1, generator=g)


class Attention(nn.Module):
    """Two heads over all rows, of which the first is the first rank's."""

    def __init__(self, heads: int = 2) -> None:
        super().__init__()
        self.inp = nn.Linear(4, 6)
        self.key = nn.Linear(6, 3 * heads, bias=False)
        self.out = nn.Linear(3 * heads, 2, bias=False)

    def whole(self, x: Any) -> Any:
        return x

    def total(self, y: Any) -> Any:
        return y

    def forward(self, x: Any) -> Any:
        k = self.key(self.whole(torch.tanh(self.inp(x))))
        heads = k.unflatten(-1, (-1, 3)).transpose(0, 1)
        mixed = torch.softmax(heads @ heads.transpose(1, 2), -1) @ heads
        return self.total(self.out(mixed.transpose(0, 1).flatten(1)))


ROWS = (3, 4)
"""Rows of each rank."""


class Gathered(Function):
    """All rows, on each rank."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        width = x.shape[1]
        whole = np.empty((sum(ROWS), width))
        counts = [n * width for n in ROWS]
        comm.Allgatherv(np.ascontiguousarray(x.detach().numpy()), [whole, counts])
        return torch.from_numpy(whole)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        first, mine, width = sum(ROWS[: comm.rank]), ROWS[comm.rank], grad.shape[1]
        given = np.ascontiguousarray(grad.numpy())
        if WRONG:
            return torch.from_numpy(given[first : first + mine].copy())
        part = np.empty((mine, width))
        comm.Reduce_scatter(given, part, recvcounts=[n * width for n in ROWS], op=MPI.SUM)
        return torch.from_numpy(part)


class ScatteredSum(Function):
    """The rows of a rank, of a sum of terms."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        width = x.shape[1]
        part = np.empty((ROWS[comm.rank], width))
        given = np.ascontiguousarray(x.detach().numpy())
        comm.Reduce_scatter(given, part, recvcounts=[n * width for n in ROWS], op=MPI.SUM)
        return torch.from_numpy(part)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        width = grad.shape[1]
        whole = np.empty((sum(ROWS), width))
        counts = [n * width for n in ROWS]
        comm.Allgatherv(np.ascontiguousarray(grad.numpy()), [whole, counts])
        return torch.from_numpy(whole)


class AttentionParts(Attention):
    def whole(self, x: Any) -> Any:
        return Gathered.apply(x)

    def total(self, y: Any) -> Any:
        return ScatteredSum.apply(y)


class SlicedGather(DataParallel):
    """Rows are gathered for all ranks, and the gradient of a rank's rows is its own alone."""

    CUT: ClassVar[dict[str, int]] = {"key.weight": 0, "out.weight": 1}
    summed_before = ("key.weight", "out.weight")

    def twin(self) -> Any:
        torch.manual_seed(5)
        return Attention()

    def parallel(self) -> Any:
        return AttentionParts(1)

    def batch(self) -> Any:
        g = torch.Generator().manual_seed(2)
        return torch.randn(7, 4, generator=g), torch.randn(7, 2, generator=g)

    def mine(self, batch: Any, rank: int, world: int) -> Any:
        return tuple(one.split(ROWS)[rank] for one in batch)


class Turned(Function):
    """From rows of a rank to its columns, by an all-to-all."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.columns = x.shape[1]
        return turned(x.detach().numpy(), ROWS, COLUMNS)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        back = turned(grad.numpy().T, COLUMNS, ROWS, WRONG)
        return back.T.contiguous()


COLUMNS = (2, 4)


def turned(given: Any, rows: Any, columns: Any, swapped: bool = False) -> Any:
    """The columns of this rank, of all rows; from its rows."""
    sent = [rows[comm.rank] * n for n in columns]
    got = [n * columns[comm.rank] for n in rows]
    firsts = np.cumsum([0, *columns[:-1]])
    pieces = [given[:, a : a + n].ravel() for a, n in zip(firsts, columns, strict=True)]
    buffer = np.concatenate(pieces)
    result = np.zeros(sum(got))
    starts = [0, got[0]]
    if swapped:
        starts = [got[1], 0]
    comm.Alltoallv([buffer, sent], [result, (got, starts)])
    return torch.from_numpy(result.reshape(sum(rows), columns[comm.rank]))


class Mixer(nn.Module):
    """Mixes rows, of each column alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(4, 6)
        self.mix = nn.Linear(7, 7, bias=False)
        self.out = nn.Linear(7, 2)

    def forward(self, x: Any) -> Any:
        columns = self.turn(torch.tanh(self.inp(x)))
        return self.out(torch.tanh(self.mix(columns.T)))

    def turn(self, x: Any) -> Any:
        return x


class MixerParts(Mixer):
    def turn(self, x: Any) -> Any:
        return Turned.apply(x)


class SwappedParts(DataParallel):
    """An all-to-all with unequal counts, whose adjoint puts the ranks' parts in the wrong order."""

    def twin(self) -> Any:
        torch.manual_seed(6)
        return Mixer()

    def parallel(self) -> Any:
        return MixerParts()

    def batch(self) -> Any:
        g = torch.Generator().manual_seed(2)
        return torch.randn(7, 4, generator=g), torch.randn(6, 2, generator=g)

    def mine(self, batch: Any, rank: int, world: int) -> Any:
        return batch[0].split(ROWS)[rank], batch[1].split(COLUMNS)[rank]


class Message(Function):
    """A tensor from one rank to another."""

    @staticmethod
    def forward(ctx: Any, x: Any, other: int, is_first: bool) -> Any:
        ctx.other, ctx.is_first = other, is_first
        if is_first:
            comm.Send(np.ascontiguousarray(x.detach().numpy()), dest=other, tag=3)
            return x.new_zeros(())
        buffer = np.empty(tuple(x.shape))
        comm.Irecv(buffer, source=other, tag=3).Wait()
        return torch.from_numpy(buffer)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        if not ctx.is_first:
            request = comm.Isend(np.ascontiguousarray(grad.numpy()), dest=ctx.other, tag=4)
            request.Wait()
            return grad, None, None
        buffer = np.empty((4, 6))
        comm.Recv(buffer, source=ctx.other, tag=4)
        found = torch.from_numpy(buffer)
        return (found / 2 if WRONG else found), None, None


class Stage(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        if comm.rank == 0:
            self.inp, self.fc1 = nn.Linear(5, 6), nn.Linear(6, 8)
            self.fc2 = nn.Linear(8, 6, bias=False)
        else:
            self.out = nn.Linear(6, 3)

    def forward(self, x: Any) -> Any:
        if comm.rank == 0:
            x = self.fc2(torch.relu(self.fc1(torch.tanh(self.inp(x)))))
            return Message.apply(x, 1, True)
        return self.out(Message.apply(x.new_zeros(4, 6).requires_grad_(), 0, False))


class Stages(Family):
    """Two stages of a pipeline; the gradient that comes back is halved."""

    def model(self, twin: Any) -> Any:
        net = Stage(8)
        state = twin.state_dict()
        net.load_state_dict({name: state[name].clone() for name in net.state_dict()})
        return net

    def step(self, net: Any, mine: Any) -> Any:
        x, t = mine
        value = net(x)
        value = value if comm.rank == 0 else self.loss(value, t)
        value.backward()
        return torch.tensor(comm.bcast(value.item(), root=1))


class ManyWays(Function):
    """Columns of the next rank beside those of this one, as NumPy can say it in many ways."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        given = np.asarray(x.detach().numpy(), dtype=np.float64)
        sent = np.ascontiguousarray(np.roll(given.T, 1, axis=0)[::-1])
        got = np.empty_like(sent)
        comm.Sendrecv([sent, MPI.DOUBLE], comm.rank ^ 1, 0, [got, MPI.DOUBLE], comm.rank ^ 1, 0)
        rows = np.concatenate([given.T, np.roll(got[::-1], -1, axis=0)])
        halves = np.split(rows * 2.0, 2)
        whole = np.vstack([halves[0], -halves[1]])
        whole[: len(halves[0])] -= 0.5 * halves[0]
        return torch.from_numpy(whole.T.copy())

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        mine, theirs = np.hsplit(np.array(grad), 2)
        got = np.zeros(mine.shape)
        sent = -2.0 * theirs[np.arange(len(theirs))]
        status = MPI.Status()
        comm.Sendrecv(sent, comm.rank ^ 1, 5, got, MPI.ANY_SOURCE, MPI.ANY_TAG, status)
        total = np.stack([mine, got]).sum(axis=0)
        if WRONG:
            total += got
        return torch.tensor(total)


class ManyWaysNet(Net):
    def __init__(self, hidden: int) -> None:
        super().__init__(hidden)
        self.scale = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])[comm.rank * 3 :][:3]

    def forward(self, x: Any) -> Any:
        x = torch.tanh(self.inp(x))
        part = Copy.apply(x, comm)[:, comm.rank * 3 : comm.rank * 3 + 3] * self.scale
        both = ManyWays.apply(part)
        both = both if comm.rank == 0 else torch.cat([-both[:, 3:] / 2, -both[:, :3] * 2], 1)
        # Each rank uses half of the rows of the result, so that both have terms of a gradient.
        rows = both.chunk(2)[comm.rank]
        return self.out(self.fc2(torch.relu(self.fc1(rows))))


class ManyWaysTwin(Net):
    def forward(self, x: Any) -> Any:
        x = torch.tanh(self.inp(x)) * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
        x = x * torch.tensor([1.0, 1.0, 1.0, -2.0, -2.0, -2.0])
        return self.out(self.fc2(torch.relu(self.fc1(x))))


class NumpyInManyWays(DataParallel):
    """An exchange by messages, with much of NumPy before and behind them; a term is added twice on
    the way back."""

    net = ManyWaysNet
    summed_before = ("inp.weight", "inp.bias")

    def twin(self) -> Any:
        torch.manual_seed(1)
        return ManyWaysTwin()

    def mine(self, batch: Any, rank: int, world: int) -> Any:
        return batch[0], batch[1].chunk(world)[rank]
