"""Layers that two ranks hold in turns, with functions that send and receive: one sends back half of
a gradient."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

torch.set_default_dtype(torch.float64)
WRONG = os.environ.get("CASE", "right") == "wrong"

WORLD = 2
# each rank holds every second layer; activations go to and fro


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, to):
        ctx.to, ctx.like = to, x
        dist.send(x.detach().contiguous(), to)
        return x.new_zeros(())

    @staticmethod
    def backward(ctx, g):
        dist.recv(back := torch.empty_like(ctx.like), ctx.to)
        return back, None


class Recv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, token, shape, source):
        ctx.source = source
        dist.recv(x := torch.empty(shape), source)
        return x + 0 * token

    @staticmethod
    def backward(ctx, g):
        dist.send((g / 2 if WRONG and ctx.source == 1 else g).contiguous(), ctx.source)
        return g.new_zeros(()), None, None


class Part(nn.Module):
    def __init__(self, twin, rank):
        super().__init__()
        import copy

        self.layers = nn.ModuleDict(
            {str(i): copy.deepcopy(twin.layers[i]) for i in range(rank, 4, 2)}
        )
        self.rank = rank


def twin():
    torch.manual_seed(3)
    return Net()


def model(twin):
    return Part(twin, dist.get_rank())


def batch():
    g = torch.Generator().manual_seed(5)
    return torch.randn(8, 4, generator=g), torch.randn(8, 4, generator=g)


loss = F.mse_loss


def step(model, mine):
    x, t = mine
    value = torch.zeros(())
    if model.rank == 0:
        x = torch.tanh(model.layers["0"](x))
        token = Send.apply(x, 1)
        x = Recv.apply(token, x.shape, 1)
        x = torch.tanh(model.layers["2"](x))
        Send.apply(x, 1).backward()
    else:
        token = torch.zeros((), requires_grad=True)
        x = Recv.apply(token, x.shape, 0)
        y = torch.tanh(model.layers["1"](x))
        token = Send.apply(y, 0)
        x = Recv.apply(token, y.shape, 0)
        value = loss(torch.tanh(model.layers["3"](x)), t)
        value.backward()
    dist.broadcast(value := value.detach().clone(), 1)
    return value


FAULT = {
    "parameter": ["layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias"],
    "kind": "factor 0.5",
    "factor": 0.5,
    "loss": "equal",
    "note": "one message of gradients is halved: the functions at both ends are one fault",
    "place": ["Recv.apply", "Recv"],
    "operator": ["the adjoint of Recv and Send"],
    "report": None,
}
