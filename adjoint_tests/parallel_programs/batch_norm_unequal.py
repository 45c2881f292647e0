"""Synchronised batch norm for ranks with different numbers of samples, written by hand; the
weight of each rank's loss is its share of the samples."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

torch.set_default_dtype(torch.float64)
WORLD = 2
WRONG = os.environ.get("CASE", "right") == "wrong"
SAMPLES = 9


def summed(x):
    dist.all_reduce(x := x.clone())
    return x


class Normalise(torch.autograd.Function):
    """[samples, channels] with the mean and variance of all ranks' samples."""

    @staticmethod
    def forward(ctx, x, eps):
        count = summed(torch.tensor(float(len(x))))
        mean = summed(x.sum(0)) / count
        scale = (summed(((x - mean) ** 2).sum(0)) / count + eps).rsqrt()
        normal = (x - mean) * scale
        ctx.save_for_backward(normal, scale, count)
        return normal

    @staticmethod
    def backward(ctx, grad):
        normal, scale, count = ctx.saved_tensors
        parts = torch.stack([grad.sum(0), (grad * normal).sum(0)])
        if WRONG:
            mean, slope = summed(parts / len(grad)) / WORLD
        else:
            mean, slope = summed(parts) / count
        return (grad - mean - normal * slope) * scale, None


class Net(nn.Module):
    def __init__(self, spread=False):
        super().__init__()
        self.inp = nn.Linear(4, 6, bias=False)
        self.bn = nn.BatchNorm1d(6, affine=False, track_running_stats=False)
        self.out = nn.Linear(6, 3)
        self.spread = spread

    def forward(self, x):
        h = self.inp(x)
        h = Normalise.apply(h, self.bn.eps) if self.spread else self.bn(h)
        return self.out(torch.relu(h))


def twin():
    torch.manual_seed(931)
    return Net()


def model(twin):
    net = Net(spread=True)
    net.load_state_dict(twin.state_dict())
    return net


def batch():
    g = torch.Generator().manual_seed(932)
    return torch.randn(SAMPLES, 4, generator=g), torch.randint(0, 3, (SAMPLES,), generator=g)


def mine(batch, rank, world):
    return tuple(v[:6] if rank == 0 else v[6:] for v in batch)


loss = F.cross_entropy


def step(model, mine):
    value = loss(model(mine[0]), mine[1]) * len(mine[1]) / SAMPLES
    value.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    return summed(value.detach())


FAULT = {
    "parameter": ["inp.weight"],
    "kind": "other", "factor": None, "loss": "equal",
    "note": "backward takes the mean of the ranks' means, though they have 6 and 3 samples; "
            "forward weighs them by their numbers",
    "place": ["summed(parts / len(grad)) / WORLD", "Normalise", "bn"],
    "report": "pytorch/pytorch#36382",
}  # fmt: skip
