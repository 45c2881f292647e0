"""Activation checkpoints in parts: a block's input is the same on the ranks of tensor
parallelism, so each keeps a part of it, and they gather it before the recomputation. 2 replicas
of 2 pieces."""

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


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        dist.all_reduce(grad := grad.clone(), group=ctx.group)
        return grad, None


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        dist.all_reduce(x := x.clone(), group=group)
        return x

    backward = staticmethod(lambda ctx, grad: (grad, None))


class Checkpoint(torch.autograd.Function):
    """Runs `block` without a graph; backward gathers the input and runs it again."""

    @staticmethod
    def forward(ctx, x, block, group, *parameters):
        ctx.block, ctx.group, ctx.shape = block, group, x.shape
        ctx.part = x.detach().flatten().chunk(2)[dist.get_rank(block.group)].clone()
        with torch.no_grad():
            return block.run(x)

    @staticmethod
    def backward(ctx, grad):
        parts = [torch.empty_like(ctx.part) for _ in range(2)]
        dist.all_gather(parts, ctx.part, group=ctx.group)
        x = torch.cat(parts).view(ctx.shape).requires_grad_()
        with torch.enable_grad():
            y = ctx.block.run(x)
        grads = torch.autograd.grad(y, [x, *ctx.block.parameters()], grad)
        return grads[0], None, None, *grads[1:]


class Block(nn.Module):
    def __init__(self, hidden=HIDDEN, mesh=None):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH, bias=False)
        self.group = mesh and mesh["tp"].get_group()
        self.saved_by = mesh and mesh["dp" if WRONG else "tp"].get_group()

    def run(self, x):
        h = F.gelu(self.up(Enter.apply(x, self.group)))
        return x + Leave.apply(self.down(h), self.group)

    def forward(self, x):
        if self.group is None:
            return x + self.down(F.gelu(self.up(x)))
        return Checkpoint.apply(x, self, self.saved_by, *self.parameters())


def build(*sizes):
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(*sizes), nn.LayerNorm(WIDTH))


def twin():
    torch.manual_seed(971)
    return build()


def shard(name, value, rank, world):
    dim = {"1.up.weight": 0, "1.up.bias": 0, "1.down.weight": 1}.get(name)
    return value if dim is None else value.chunk(2, dim)[rank % 2]


def model(twin):
    net = build(HIDDEN // 2, init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
    state = {k: shard(k, v, dist.get_rank(), WORLD) for k, v in twin.state_dict().items()}
    net.load_state_dict(state)
    net.copies = [dist.new_group([0, 2]), dist.new_group([1, 3])][dist.get_rank() % 2]
    return net


def batch():
    return tuple(torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(972)))


def mine(batch, rank, world):
    return tuple(v.chunk(2)[rank // 2] for v in batch)


loss = F.mse_loss


def step(model, mine):
    value = loss(model(mine[0]), mine[1]) / 2
    value.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, group=model.copies)
    dist.all_reduce(total := value.detach().clone(), group=model.copies)
    return total


FAULT = {
    "parameter": ["0.weight", "0.bias", "1.up.weight", "1.up.bias", "1.down.weight"],
    "kind": "other", "factor": None, "loss": "equal",
    "note": "the parts of the input are gathered over dp, not over tp: the recomputation mixes "
            "the samples of two replicas",
    "place": ["1", "dist.all_gather(parts, ctx.part", "mesh[\"dp\" if WRONG else \"tp\"]",
              "Checkpoint"],
    "report": "NVIDIA/Megatron-LM#7452",
}  # fmt: skip
