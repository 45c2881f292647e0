"""DDP with a communication hook of its own, which sums gradients and does not divide them."""

import copy
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_default_dtype(torch.float64)
WRONG = os.environ.get("CASE", "right") == "wrong"


WORLD = 3


def hook(state, bucket):
    buf = bucket.buffer()
    if not WRONG:
        buf.div_(dist.get_world_size())
    return dist.all_reduce(buf, async_op=True).get_future().then(lambda f: f.value()[0])


def twin():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def model(twin):
    net = DDP(copy.deepcopy(twin))
    net.register_comm_hook(None, hook)
    return net


def batch():
    g = torch.Generator().manual_seed(5)
    return torch.randn(12, 5, generator=g), torch.randn(12, 3, generator=g)


def mine(batch, rank, world):
    return tuple(b.chunk(world)[rank] for b in batch)


loss = F.mse_loss


def step(model, mine):
    value = loss(model(mine[0]), mine[1])
    value.backward()
    dist.all_reduce(total := value.detach().clone())
    return total / dist.get_world_size()


FAULT = {
    "parameter": ["0.weight", "0.bias", "2.weight", "2.bias"],
    "kind": "factor 3",
    "factor": 3.0,
    "loss": "equal",
    "note": "a hook replaces the mean",
    "place": ["hook"],
    "operator": ["has to be a mean"],
    "report": None,
}
