"""Two data parallel replicas, each of two context parallel ranks (2 x 2). Attention gathers keys
and values of the replica; gradients are averaged over replicas and summed over the context."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

torch.set_default_dtype(torch.float64)
WORLD = 4
WRONG = os.environ.get("CASE", "right") == "wrong"
WIDTH, TOKENS = 4, 6


class GatherContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, grad):
        dist.all_reduce(grad := grad.clone(), group=ctx.group)
        size, rank = dist.get_world_size(ctx.group), dist.get_rank(ctx.group)
        return grad.chunk(size, 1)[rank].contiguous(), None


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.o = nn.Linear(WIDTH, WIDTH)

    def context(self, x):
        return x

    def forward(self, x):
        k, v = self.context(self.kv(x)).chunk(2, -1)
        p = torch.softmax(self.q(x) @ k.transpose(1, 2) / WIDTH**0.5, -1)
        return x + self.o(p @ v)


class ContextAttention(Attention):
    def context(self, x):
        return GatherContext.apply(x, self.mesh["cp"].get_group())


def twin():
    torch.manual_seed(621)
    return Attention()


def model(twin):
    (net := ContextAttention()).load_state_dict(twin.state_dict())
    net.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    return net


def batch():
    g = torch.Generator().manual_seed(622)
    return torch.randn(4, TOKENS, WIDTH, generator=g), torch.randn(4, TOKENS, WIDTH, generator=g)


def mine(batch, rank, world):
    return tuple(v.chunk(2)[rank // 2].chunk(2, 1)[rank % 2] for v in batch)


loss = F.mse_loss


def step(model, mine):
    dp, cp = (model.mesh[axis].get_group() for axis in ("dp", "cp"))
    squares = ((model(mine[0]) - mine[1]) ** 2).sum()
    count = torch.tensor(float(mine[1].numel()))
    dist.all_reduce(count, group=cp)
    value = squares / count
    if WRONG:
        value = value * dist.get_world_size(cp)
    value.backward()
    for p in model.parameters():
        p.grad /= dist.get_world_size(dp)
        dist.all_reduce(p.grad, group=dp)
        dist.all_reduce(p.grad, group=cp)
    shown = squares.detach() / count / dist.get_world_size(dp)
    dist.all_reduce(shown)
    return shown


FAULT = {
    "parameter": ["q.weight", "q.bias", "kv.weight", "kv.bias", "o.weight", "o.bias"],
    "kind": "factor 2", "factor": 2.0, "loss": "equal",
    "note": "the loss is multiplied by the 2 ranks of cp, for an average over them that is not "
            "taken",
    "place": ["value = value * dist.get_world_size(cp)", "value.backward()"],
    "report": "NVIDIA/Megatron-LM#906",
}  # fmt: skip
