"""Vector quantised autoencoder with DDP. The codebook is a buffer, moved to the mean of what was
assigned to it; encoder and decoder are trained with the straight-through estimator."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.set_default_dtype(torch.float64)
WORLD = 2
WRONG = os.environ.get("CASE", "right") == "wrong"
CODES, WIDTH, DECAY = 4, 3, 0.8


class Codebook(nn.Module):
    def __init__(self, spread=False):
        super().__init__()
        self.spread = spread
        self.register_buffer("embed", torch.randn(CODES, WIDTH))
        self.register_buffer("cluster_size", torch.ones(CODES))

    def forward(self, h):
        nearest = torch.cdist(h.detach(), self.embed).argmin(1)
        quantised = self.embed[nearest]
        if self.training:
            self.update(h.detach(), F.one_hot(nearest, CODES).to(h.dtype))
        return h + (quantised - h).detach()

    def update(self, h, chosen):
        size, total = chosen.sum(0), chosen.T @ h
        if self.spread:
            dist.all_reduce(size)
            dist.all_reduce(total)
        new = self.cluster_size.lerp(size, 1 - DECAY)
        moved = (DECAY * self.cluster_size[:, None] * self.embed + (1 - DECAY) * total) / new[
            :, None
        ]
        self.embed, self.cluster_size = moved, new


class Autoencoder(nn.Module):
    def __init__(self, spread=False):
        super().__init__()
        self.encode, self.decode = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 5)
        self.codes = Codebook(spread)

    def forward(self, x):
        return self.decode(self.codes(self.encode(x)))


def twin():
    torch.manual_seed(821)
    return Autoencoder()


def model(twin):
    net = Autoencoder(spread=not WRONG)
    net.load_state_dict(twin.state_dict())
    return DistributedDataParallel(net, broadcast_buffers=False)


def batch():
    x = torch.randn(12, 5, generator=torch.Generator().manual_seed(822))
    return x, x


def mine(batch, rank, world):
    return tuple(v[rank::world] for v in batch)


loss = F.mse_loss


def step(model, mine):
    value = loss(model(mine[0]), mine[1])
    value.backward()
    dist.all_reduce(total := value.detach() / WORLD)
    return total


FAULT = {
    "parameter": [],
    "state": ["codes.embed", "codes.cluster_size"],
    "kind": "statistics per rank", "factor": None, "loss": "equal",
    "note": "the codebook moves to the means of the rank's own samples; gradients are right, the "
            "buffers of the ranks part",
    "place": ["codes", "spread=not WRONG", "update", "self.embed, self.cluster_size"],
    "report": "espnet/espnet#6284",
}  # fmt: skip
