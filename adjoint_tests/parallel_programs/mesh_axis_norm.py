"""Data and tensor parallel training on a mesh of named axes (2 x 2). After the backward pass the
gradients of cut layers and of replicated ones are averaged over the replicas."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

torch.set_default_dtype(torch.float64)
WORLD = 4
WRONG = os.environ.get("CASE", "right") == "wrong"
WIDTH, HIDDEN = 4, 6


class Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        dist.all_reduce(grad := grad.clone(), group=ctx.group)
        return grad, None


class Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        dist.all_reduce(x := x.clone(), group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Block(nn.Module):
    def __init__(self, hidden=HIDDEN, group=None):
        super().__init__()
        self.group = group
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH, bias=False)

    def forward(self, x):
        h = self.norm(x)
        if self.group is None:
            return x + self.down(F.gelu(self.up(h)))
        h = self.down(F.gelu(self.up(Spread.apply(h, self.group))))
        return x + Collect.apply(h, self.group)


def twin():
    torch.manual_seed(751)
    return nn.Sequential(Block(), Block())


def shard(name, value, rank, world):
    part = name.split(".", 1)[1]
    dim = {"up.weight": 0, "up.bias": 0, "down.weight": 1}.get(part)
    return value if dim is None else value.chunk(2, dim)[rank % 2]


def model(twin):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    net = nn.Sequential(*(Block(HIDDEN // 2, mesh["tp"].get_group()) for _ in range(2)))
    state = {k: shard(k, v, dist.get_rank(), WORLD) for k, v in twin.state_dict().items()}
    net.load_state_dict(state)
    net.mesh = mesh
    return net


def batch():
    g = torch.Generator().manual_seed(752)
    return torch.randn(6, WIDTH, generator=g), torch.randn(6, WIDTH, generator=g)


def mine(batch, rank, world):
    return tuple(v.chunk(2)[rank // 2] for v in batch)


loss = F.mse_loss


def step(model, mine):
    axes = {"cut": "dp", "replicated": "tp" if WRONG else "dp"}
    value = loss(model(mine[0]), mine[1])
    value.backward()
    for name, p in model.named_parameters():
        axis = axes["replicated" if "norm" in name else "cut"]
        p.grad /= model.mesh[axis].size()
        dist.all_reduce(p.grad, group=model.mesh[axis].get_group())
    dist.all_reduce(total := value.detach() / WORLD)
    return total


FAULT = {
    "parameter": ["0.norm.weight", "0.norm.bias", "1.norm.weight", "1.norm.bias"],
    "kind": "sum over the wrong group", "factor": None, "loss": "equal",
    "accept": ["missing sum over 2 ranks"],
    "note": "the norms are averaged over tp, where their gradients are the same, and not over dp",
    "place": ["norm", "\"replicated\": \"tp\" if WRONG", "dist.all_reduce(p.grad"],
    "report": "NVIDIA/Megatron-LM#5916",
}  # fmt: skip
