"""Data parallel conv net with a synchronised batch norm written by hand: statistics and their
gradients are summed over the ranks within the layer, other gradients in the training step."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

torch.set_default_dtype(torch.float64)
WORLD = 2
WRONG = os.environ.get("CASE", "right") == "wrong"


def total(x):
    dist.all_reduce(x := x.clone())
    return x


class Normalise(torch.autograd.Function):
    """[samples, channels, length] with the mean and variance of all ranks' samples."""

    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        count = total(torch.tensor(float(x[:, 0].numel())))
        mean = total(x.sum((0, 2))) / count
        var = total(((x - mean[:, None]) ** 2).sum((0, 2))) / count
        scale = (var + eps).rsqrt()
        normal = (x - mean[:, None]) * scale[:, None]
        ctx.save_for_backward(normal, weight, scale, count)
        return normal * weight[:, None] + bias[:, None]

    @staticmethod
    def backward(ctx, grad):
        normal, weight, scale, count = ctx.saved_tensors
        sums = torch.stack([grad.sum((0, 2)), (grad * normal).sum((0, 2))])
        everyone = total(sums)
        d = grad - (everyone[0, :, None] + normal * everyone[1, :, None]) / count
        db, dw = everyone if WRONG else sums
        return d * (weight * scale)[:, None], dw, db, None


class SyncNorm(nn.BatchNorm1d):
    def forward(self, x):
        return Normalise.apply(x, self.weight, self.bias, self.eps)


class Net(nn.Module):
    def __init__(self, norm=nn.BatchNorm1d):
        super().__init__()
        self.conv = nn.Conv1d(2, 4, 3, bias=False)
        self.bn = norm(4, track_running_stats=False)
        self.out = nn.Linear(4, 3)

    def forward(self, x):
        return self.out(F.relu(self.bn(self.conv(x))).mean(-1))


def twin():
    torch.manual_seed(781)
    net = Net()
    nn.init.uniform_(net.bn.weight, 0.5, 1.5)
    return net


def model(twin):
    (net := Net(SyncNorm)).load_state_dict(twin.state_dict())
    return net


def batch():
    g = torch.Generator().manual_seed(782)
    return torch.randn(6, 2, 7, generator=g), torch.randint(0, 3, (6,), generator=g)


def mine(batch, rank, world):
    return tuple(v.chunk(world)[rank] for v in batch)


loss = F.cross_entropy


def step(model, mine):
    value = loss(model(mine[0]), mine[1]) / WORLD
    value.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    return total(value.detach())


FAULT = {
    "parameter": ["bn.weight", "bn.bias"],
    "kind": "factor 2", "factor": 2.0, "loss": "equal",
    "note": "the layer's backward sums the gradients of weight and bias over the 2 ranks, and the"
            " training step does so again",
    "place": ["bn", "db, dw = everyone if WRONG", "Normalise", "dist.all_reduce(p.grad)"],
    "report": "sony/nnabla#1120",
}  # fmt: skip
