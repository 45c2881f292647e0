"""An encoder on rank 0, whose result is broadcast to a head on each other rank; their gradients
come back by messages."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

torch.set_default_dtype(torch.float64)

WORLD = 3
WRONG = os.environ.get("CASE", "right") == "wrong"
NAMES = ("a", "b")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 5), nn.Tanh())
        self.heads = nn.ModuleDict({name: nn.Linear(5, 2) for name in NAMES})

    def forward(self, x):
        h = self.encoder(x)
        return torch.stack([self.heads[name](h) for name in NAMES])


class Part(nn.Module):
    def __init__(self, rank, whole):
        super().__init__()
        self.rank = rank
        if rank == 0:
            self.encoder = whole.encoder
        else:
            self.heads = nn.ModuleDict({NAMES[rank - 1]: whole.heads[NAMES[rank - 1]]})


def twin():
    torch.manual_seed(1131)
    return Net()


def model(twin):
    (whole := Net()).load_state_dict(twin.state_dict())
    return Part(dist.get_rank(), whole)


def batch():
    g = torch.Generator().manual_seed(1132)
    return torch.randn(6, 4, generator=g), torch.randn(2, 6, 2, generator=g)


loss = F.mse_loss


def encode(model, x):
    h = model.encoder(x)
    buffer = h.detach().clone()
    dist.broadcast(buffer, 0)
    total = torch.zeros_like(h)
    for source in range(1, WORLD):
        dist.recv(grad := torch.empty_like(h), source)
        if not WRONG or source == 1:
            total += grad
    h.backward(total)
    return torch.zeros(())


def decode(model, target):
    dist.broadcast(h := torch.empty(6, 5), 0)
    k = model.rank - 1
    value = loss(model.heads[NAMES[k]](h.requires_grad_()), target[k]) / 2
    value.backward()
    dist.send(h.grad, 0)
    return value.detach().clone()


def step(model, mine):
    value = decode(model, mine[1]) if model.rank else encode(model, mine[0])
    dist.all_reduce(value)
    return value


FAULT = {
    "parameter": ["encoder.0.weight", "encoder.0.bias"],
    "kind": "other", "factor": None, "loss": "equal",
    "note": "the gradient of the second head arrives, and is not added",
    "place": ["dist.recv(grad := torch.empty_like(h), source)", "total += grad",
              "h.backward(total)"],
    "report": None,
}  # fmt: skip
