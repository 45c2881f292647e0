"""Low-rank adapters on the layers of a sequence parallel MLP; the base weights are frozen. A is
replicated before the column parallel layer, B after the row parallel one."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

torch.set_default_dtype(torch.float64)
WORLD = 2
WRONG = os.environ.get("CASE", "right") == "wrong"
WIDTH, HIDDEN, RANK = 4, 6, 2


def gathered(x):
    out = x.new_empty(WORLD * len(x), x.shape[1])
    dist.all_gather_into_tensor(out, x.contiguous())
    return out


def scattered(x):
    dist.all_reduce(x := x.clone())
    return x.chunk(WORLD)[dist.get_rank()].contiguous()


class Gather(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: gathered(x))
    backward = staticmethod(lambda ctx, grad: scattered(grad))


class Scatter(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: scattered(x))
    backward = staticmethod(lambda ctx, grad: gathered(grad))


class Adapted(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / 2, requires_grad=False)
        self.lora_A = nn.Parameter(torch.randn(RANK, inputs))
        self.lora_B = nn.Parameter(torch.randn(outputs, RANK))


class Mlp(nn.Module):
    def __init__(self, hidden=HIDDEN):
        super().__init__()
        self.fc1, self.fc2 = Adapted(WIDTH, hidden), Adapted(hidden, WIDTH)

    def forward(self, x):
        h = F.gelu(x @ self.fc1.weight.T + x @ self.fc1.lora_A.T @ self.fc1.lora_B.T)
        return h @ self.fc2.weight.T + h @ self.fc2.lora_A.T @ self.fc2.lora_B.T


class ParallelMlp(Mlp):
    def forward(self, x):
        low = Gather.apply(x @ self.fc1.lora_A.T)
        h = F.gelu(Gather.apply(x) @ self.fc1.weight.T + low @ self.fc1.lora_B.T)
        low = Scatter.apply(h @ self.fc2.lora_A.T)
        return Scatter.apply(h @ self.fc2.weight.T) + low @ self.fc2.lora_B.T


def twin():
    torch.manual_seed(861)
    return Mlp()


def shard(name, value, rank, world):
    dim = {"fc1.weight": 0, "fc1.lora_B": 0, "fc2.weight": 1, "fc2.lora_A": 1}.get(name)
    return value if dim is None else value.chunk(world, dim)[rank]


def model(twin):
    net = ParallelMlp(HIDDEN // WORLD)
    state = {k: shard(k, v, dist.get_rank(), WORLD) for k, v in twin.state_dict().items()}
    net.load_state_dict(state)
    for p in (net.fc1.lora_A, net.fc2.lora_B):
        p.sequence_parallel = not WRONG
    return net


def batch():
    return tuple(torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(862)))


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
    "parameter": ["fc1.lora_A", "fc2.lora_B"],
    "kind": "missing sum over 2 ranks", "factor": None, "loss": "equal",
    "note": "the replicated factors see the rank's part of the sequence, and have no mark for the"
            " sum",
    "place": ["fc1", "fc2", "p.sequence_parallel = not WRONG", "lora_A", "lora_B"],
    "report": "modelscope/mcore-bridge#173",
}  # fmt: skip
