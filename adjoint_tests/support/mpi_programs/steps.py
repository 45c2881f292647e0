"""Parallel torch programs over mpi4py, each right and, with ``CASE=wrong``, with one fault, for
tests of `linop.testing.parallel.mpi`. A program is a class: ``steps.py:MissingAllReduce``."""

from __future__ import annotations

import os
from typing import Any, ClassVar

import numpy as np
import torch
from mpi4py import MPI
from numpy import zeros as unseen_zeros
from torch import nn

WRONG = os.environ.get("CASE", "right") == "wrong"
comm = MPI.COMM_WORLD
Function: Any = torch.autograd.Function


def summed(tensor: torch.Tensor, over: Any = comm) -> torch.Tensor:
    """The sum of the ranks' tensors."""
    mine = np.ascontiguousarray(tensor.detach().numpy())
    total = np.empty_like(mine)
    over.Allreduce(mine, total, op=MPI.SUM)
    return torch.from_numpy(total)


class Copy(Function):
    """A replicated tensor, used by each rank for a part of the model."""

    @staticmethod
    def forward(ctx: Any, x: Any, over: Any) -> Any:
        ctx.over = over
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return summed(grad, ctx.over), None


class Sum(Function):
    """The sum of terms, replicated."""

    @staticmethod
    def forward(ctx: Any, x: Any, over: Any) -> Any:
        return summed(x, over)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad, None


class Net(nn.Module):
    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.inp = nn.Linear(5, 6)
        self.fc1 = nn.Linear(6, hidden)
        self.fc2 = nn.Linear(hidden, 6, bias=False)
        self.out = nn.Linear(6, 3)

    def forward(self, x: Any) -> Any:
        return self.out(self.fc2(torch.relu(self.fc1(torch.tanh(self.inp(x))))))


class Family:
    """The parts that most programs share: a model of two ranks, cut as `CUT` says."""

    CUT: ClassVar[dict[str, int]] = {}
    net: Any = Net

    def twin(self) -> Any:
        torch.manual_seed(1)
        return Net()

    def parallel(self) -> Any:
        return self.net(8 // comm.size if self.CUT else 8)

    def model(self, twin: Any) -> Any:
        net = self.parallel()
        parts = {
            name: self.shard(name, value, comm.rank, comm.size).clone()
            for name, value in twin.state_dict().items()
        }
        net.load_state_dict(parts)
        return net

    def shard(self, name: str, value: Any, rank: int, world: int) -> Any:
        dim = self.CUT.get(name)
        return value if dim is None else value.chunk(world, dim)[rank]

    def batch(self) -> Any:
        g = torch.Generator().manual_seed(2)
        return torch.randn(4, 5, generator=g), torch.randn(4, 3, generator=g)

    def loss(self, output: Any, target: Any) -> Any:
        return ((output - target) ** 2).sum() / 12


TENSOR = {"fc1.weight": 0, "fc1.bias": 0, "fc2.weight": 1}


class MissingAllReduceNet(Net):
    def forward(self, x: Any) -> Any:
        x = torch.tanh(self.inp(x))
        x = x if WRONG else Copy.apply(x, comm)
        return self.out(Sum.apply(self.fc2(torch.relu(self.fc1(x))), comm))


class MissingAllReduce(Family):
    """The input of a layer that is cut by columns is used as it is."""

    CUT, net = TENSOR, MissingAllReduceNet


class SumTwice(Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return summed(x)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return summed(grad) if WRONG else grad


class TooManyNet(Net):
    def forward(self, x: Any) -> Any:
        x = Copy.apply(torch.tanh(self.inp(x)), comm)
        return self.out(SumTwice.apply(self.fc2(torch.relu(self.fc1(x)))))


class TooManyAllReduces(Family):
    """A sum to a replicated tensor is summed again on the way back."""

    CUT, net = TENSOR, TooManyNet


class InPlace(Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        y = x.detach() if WRONG else x.detach().clone()
        comm.Allreduce(MPI.IN_PLACE, y.numpy(), op=MPI.SUM)
        return y.clone()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad


class InPlaceNet(Net):
    def forward(self, x: Any) -> Any:
        x = torch.tanh(self.inp(x))
        part = self.fc2(torch.relu(self.fc1(Copy.apply(x, comm))))
        y = InPlace.apply(part)
        # The sum is used again: by half of the ranks if it has been overwritten.
        return self.out(y + 0.5 * Sum.apply(part, comm))


class InPlaceTwin(Net):
    def forward(self, x: Any) -> Any:
        return self.out(1.5 * self.fc2(torch.relu(self.fc1(torch.tanh(self.inp(x))))))


class OverwrittenArgument(Family):
    """A sum is taken in place, and overwrites a tensor that is used again."""

    CUT, net = TENSOR, InPlaceNet

    def twin(self) -> Any:
        torch.manual_seed(1)
        return InPlaceTwin()


class Broadcast(Function):
    """A tensor of rank 0, on all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        buffer = x.detach().numpy().copy()
        comm.Bcast(buffer, root=0)
        return torch.from_numpy(buffer)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad if WRONG else summed(grad)


class BroadcastNet(Net):
    def forward(self, x: Any) -> Any:
        x = torch.tanh(self.inp(x))
        x = torch.relu(nn.functional.linear(x, Broadcast.apply(self.fc1.weight), self.fc1.bias))
        return self.out(self.fc2(x))


class DataParallel(Family):
    """Each rank has a part of the batch; gradients are summed after the pass."""

    net: Any = Net
    summed_before: tuple[str, ...] = ()

    def mine(self, batch: Any, rank: int, world: int) -> Any:
        return tuple(one.chunk(world)[rank] for one in batch)

    def step(self, net: Any, mine: Any) -> Any:
        x, t = mine
        value = self.loss(net(x), t)
        value.backward()
        for name, one in net.named_parameters():
            if name not in self.summed_before:
                comm.Allreduce(MPI.IN_PLACE, one.grad.numpy(), op=MPI.SUM)
        total = np.zeros(1)
        comm.Allreduce(np.array([value.item()]), total)
        return torch.tensor(total[0])


class BroadcastWithoutSum(DataParallel):
    """The weight of rank 0 is used by all ranks, and its gradient is each rank's."""

    net, summed_before = BroadcastNet, ("fc1.weight",)


class ForgottenParameter(DataParallel):
    """The gradient of a bias is not summed."""

    @property
    def summed_before(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("out.bias",) if WRONG else ()


class RootedBroadcast(Function):
    """A tensor of rank 0, on all ranks; its gradient is rank 0's."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        buffer = x.detach().numpy().copy()
        comm.Bcast(buffer, root=0)
        return torch.from_numpy(buffer)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        root = 1 if WRONG else 0
        total = np.zeros(tuple(grad.shape))
        comm.Reduce(np.ascontiguousarray(grad.numpy()), total, op=MPI.SUM, root=root)
        return torch.from_numpy(total)


class RootedNet(Net):
    def forward(self, x: Any) -> Any:
        x = torch.tanh(self.inp(x))
        x = torch.relu(
            nn.functional.linear(x, RootedBroadcast.apply(self.fc1.weight), self.fc1.bias)
        )
        return self.out(self.fc2(x))


class RootsDiffer(DataParallel):
    """The weight of rank 0 is broadcast, and its gradient is reduced to rank 1, and then taken from
    rank 0."""

    net, summed_before = RootedNet, ("fc1.weight",)

    def step(self, net: Any, mine: Any) -> Any:
        value = super().step(net, mine)
        comm.Bcast(net.fc1.weight.grad.numpy(), root=0)
        return value


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


class GridNet(Net):
    """On a grid of 2 by 2 ranks: rows have parts of the batch, columns parts of the model."""

    def __init__(self, hidden: int) -> None:
        super().__init__(hidden)
        self.model_axis = comm.Split(comm.rank // 2, comm.rank)
        self.data_axis = comm.Split(comm.rank % 2, comm.rank)

    def forward(self, x: Any) -> Any:
        x = Copy.apply(torch.tanh(self.inp(x)), self.data_axis if WRONG else self.model_axis)
        return self.out(Sum.apply(self.fc2(torch.relu(self.fc1(x))), self.model_axis))


class WrongCommunicator(Family):
    """A gradient is summed over the ranks of the data, instead of those of the model."""

    CUT, net = TENSOR, GridNet

    def parallel(self) -> Any:
        return GridNet(4)

    def shard(self, name: str, value: Any, rank: int, world: int) -> Any:
        dim = self.CUT.get(name)
        return value if dim is None else value.chunk(2, dim)[rank % 2]

    def mine(self, batch: Any, rank: int, world: int) -> Any:
        return tuple(one.chunk(2)[rank // 2] for one in batch)

    def step(self, net: Any, mine: Any) -> Any:
        x, t = mine
        value = self.loss(net(x), t)
        value.backward()
        for one in net.parameters():
            net.data_axis.Allreduce(MPI.IN_PLACE, one.grad.numpy(), op=MPI.SUM)
        total = np.zeros(1)
        net.data_axis.Allreduce(np.array([value.item()]), total)
        return torch.tensor(total[0])


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


class Unseen(Function):
    """A sum in an array that nobody looks at."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        buffer = unseen_zeros(tuple(x.shape))
        buffer[...] = x.detach().numpy()
        comm.Allreduce(MPI.IN_PLACE, buffer, op=MPI.SUM)
        return torch.from_numpy(buffer)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * 3 if WRONG else grad


class UnseenNet(Net):
    def forward(self, x: Any) -> Any:
        x = Copy.apply(torch.tanh(self.inp(x)), comm)
        return self.out(Unseen.apply(self.fc2(torch.relu(self.fc1(x)))))


class UnseenArrays(Family):
    """What cannot be followed element by element is decided by numbers."""

    CUT, net = TENSOR, UnseenNet
