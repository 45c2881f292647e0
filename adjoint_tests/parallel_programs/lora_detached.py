"""A frozen row parallel layer with a low-rank adapter whose inner products are summed over the
ranks, in a buffer that is used again in each forward pass."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

torch.set_default_dtype(torch.float64)
WORLD = 2
WRONG = os.environ.get("CASE", "right") == "wrong"
WIDTH, HIDDEN, RANK, SAMPLES = 4, 6, 2, 5


class ReduceOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        dist.all_reduce(x := x.clone())
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class Net(nn.Module):
    def __init__(self, hidden=HIDDEN):
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH, bias=False).requires_grad_(False)
        self.lora_a = nn.Linear(hidden, RANK, bias=False)
        self.lora_b = nn.Linear(RANK, WIDTH, bias=False)

    def join(self, base, low):
        return base, low

    def forward(self, x):
        h = torch.tanh(self.up(x))
        base, low = self.join(self.down(h), self.lora_a(h))
        return base + self.lora_b(low)


class ParallelNet(Net):
    def join(self, base, low):
        if WRONG:
            joined = torch.empty(SAMPLES, WIDTH + RANK)
            joined.detach().copy_(torch.cat([base, low], 1).detach())
            dist.all_reduce(joined)
            return ReduceOut.apply(base), joined[:, WIDTH:]
        return ReduceOut.apply(torch.cat([base, low], 1)).split([WIDTH, RANK], 1)


def twin():
    torch.manual_seed(871)
    return Net()


def shard(name, value, rank, world):
    dim = {"up.weight": 0, "up.bias": 0, "down.weight": 1, "lora_a.weight": 1}.get(name)
    return value if dim is None else value.chunk(world, dim)[rank]


def model(twin):
    net = ParallelNet(HIDDEN // WORLD)
    state = {k: shard(k, v, dist.get_rank(), WORLD) for k, v in twin.state_dict().items()}
    net.load_state_dict(state)
    return net


def batch():
    return tuple(torch.randn(2, SAMPLES, WIDTH, generator=torch.Generator().manual_seed(872)))


loss = F.mse_loss


FAULT = {
    "parameter": ["lora_a.weight", "up.weight", "up.bias"],
    "kind": "no gradient", "factor": None, "loss": "equal",
    "kinds": {
        "up.weight": "other",
        "up.bias": "other",
    },
    "note": "the adapter's inner product is summed in memory that autograd does not follow: "
            "nothing comes back to lora_a, nor through it to the layer before",
    "place": ["lora_a", "joined.detach().copy_", "joined", "join"],
    "report": "NVIDIA-NeMo/Megatron-Bridge#5634",
}  # fmt: skip
