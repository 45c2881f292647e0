"""Parallel torch programs over mpi4py that reduce and broadcast, each right and, with
``CASE=wrong``, with one fault, for tests of `check_mpi`. A program is a class:
``steps.py:MissingAllReduce``."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from mpi_common import TENSOR, WRONG, Copy, DataParallel, Family, Function, Net, Sum, comm, summed
from numpy import zeros as unseen_zeros
from torch import nn


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
    """Elements that cannot be followed are decided by numbers."""

    CUT, net = TENSOR, UnseenNet


class Pickled(Function):
    """A sum of arrays that are sent as objects."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return torch.from_numpy(comm.allreduce(x.detach().numpy()))

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return torch.from_numpy(comm.allreduce(grad.numpy())) if WRONG else grad


class PickledNet(Net):
    def forward(self, x: Any) -> Any:
        x = Copy.apply(torch.tanh(self.inp(x)), comm)
        return self.out(Pickled.apply(self.fc2(torch.relu(self.fc1(x)))))


class PickledSum(Family):
    """A sum of objects to a replicated tensor is summed again on the way back."""

    CUT, net = TENSOR, PickledNet


class TensorsGathered(Function):
    """A sum by an all-gather of tensors, which mpi4py takes as they are."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        parts = torch.empty((comm.size, *x.shape), dtype=x.dtype)
        comm.Allgather(x.detach().contiguous(), parts)
        return parts.sum(0)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        grad = grad.clone()
        if WRONG:
            comm.Allreduce(MPI.IN_PLACE, grad)
        return grad


class TensorsNet(Net):
    def forward(self, x: Any) -> Any:
        x = Copy.apply(torch.tanh(self.inp(x)), comm)
        return self.out(TensorsGathered.apply(self.fc2(torch.relu(self.fc1(x)))))


class SumOfGathered(Family):
    """A sum by an all-gather, summed again on the way back."""

    CUT, net = TENSOR, TensorsNet


class FlatBuffer(DataParallel):
    """All gradients are summed in one buffer; it is not divided by the number of ranks."""

    def loss(self, output: Any, target: Any) -> Any:
        return ((output - target) ** 2).mean()

    def step(self, net: Any, mine: Any) -> Any:
        x, t = mine
        value = self.loss(net(x), t)
        value.backward()
        flat = np.concatenate([one.grad.numpy().ravel() for one in net.parameters()])
        total = np.empty_like(flat)
        comm.Allreduce(flat, total)
        if not WRONG:
            total /= comm.size
        at = 0
        for one in net.parameters():
            part = total[at : at + one.numel()].reshape(tuple(one.shape))
            one.grad.copy_(torch.from_numpy(part))
            at += one.numel()
        return torch.tensor(comm.allreduce(value.item()) / comm.size)
