"""Megatron-style sequence parallel decoder: norms run on a rank's tokens, and parameters that
carry the mark `sequence_parallel` get their gradients summed over the tensor parallel group."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

torch.set_default_dtype(torch.float64)
WORLD = 2
WRONG = os.environ.get("CASE", "right") == "wrong"
WIDTH, HIDDEN, LAYERS = 4, 8, 2


def gather(x):
    parts = [torch.empty_like(x) for _ in range(WORLD)]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts)


def scatter_sum(x):
    dist.all_reduce(x := x.clone())
    return x.chunk(WORLD)[dist.get_rank()].contiguous()


class GatherSequence(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: gather(x))
    backward = staticmethod(lambda ctx, grad: scatter_sum(grad))


class ScatterSequence(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: scatter_sum(x))
    backward = staticmethod(lambda ctx, grad: gather(grad))


class Layer(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class ParallelLayer(Layer):
    def forward(self, x):
        h = F.gelu(self.up(GatherSequence.apply(self.norm(x))))
        return x + ScatterSequence.apply(self.down(h))


class Decoder(nn.Module):
    def __init__(self, layer=Layer, hidden=HIDDEN):
        super().__init__()
        self.layers = nn.ModuleList(layer(hidden) for _ in range(LAYERS))
        self.final_norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.final_norm(x)


def twin():
    torch.manual_seed(501)
    return Decoder()


def shard(name, value, rank, world):
    dim = {"up.weight": 0, "up.bias": 0, "down.weight": 1}.get(".".join(name.split(".")[-2:]))
    return value if dim is None else value.chunk(world, dim)[rank]


def model(twin):
    net = Decoder(ParallelLayer, HIDDEN // WORLD)
    state = {k: shard(k, v, dist.get_rank(), WORLD) for k, v in twin.state_dict().items()}
    net.load_state_dict(state)
    marked = [layer.norm for layer in net.layers] + ([] if WRONG else [net.final_norm])
    for norm in marked:
        for p in norm.parameters():
            p.sequence_parallel = True
    return net


def batch():
    return tuple(torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(502)))


def mine(batch, rank, world):
    return tuple(v.chunk(world)[rank] for v in batch)


loss = F.mse_loss


def step(model, mine):
    value = loss(model(mine[0]), mine[1]) / WORLD
    value.backward()
    for p in model.parameters():
        if getattr(p, "sequence_parallel", False):
            dist.all_reduce(p.grad)
    dist.all_reduce(total := value.detach().clone())
    return total


FAULT = {
    "parameter": ["final_norm.weight", "final_norm.bias"],
    "kind": "missing sum over 2 ranks", "factor": None, "loss": "equal",
    "note": "the last norm has no mark, so its gradients are those of the rank's own tokens",
    "place": ["final_norm", "[] if WRONG else [net.final_norm]", "p.sequence_parallel = True"],
    "report": "NVIDIA/Megatron-LM#1446",
}  # fmt: skip
