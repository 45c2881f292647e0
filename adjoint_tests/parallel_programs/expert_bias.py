"""Mixture of experts with balancing by biases: a buffer is added to the scores when experts are
chosen, and moves against the load of each expert in the batch. Data parallel by hand."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

torch.set_default_dtype(torch.float64)
WORLD = 4
WRONG = os.environ.get("CASE", "right") == "wrong"
EXPERTS, TOP, WIDTH, RATE = 4, 2, 3, 0.01


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.register_buffer("expert_bias", torch.zeros(EXPERTS))
        self.register_buffer("load", torch.zeros(EXPERTS), persistent=False)

    def forward(self, x):
        scores = torch.sigmoid(self.gate(x))
        chosen = (scores + self.expert_bias).topk(TOP, -1).indices
        self.load = torch.bincount(chosen.flatten(), minlength=EXPERTS).double()
        kept = torch.zeros_like(scores).scatter(-1, chosen, scores.gather(-1, chosen))
        return kept / kept.sum(-1, keepdim=True)


class Moe(nn.Module):
    def __init__(self, spread=False):
        super().__init__()
        self.spread = spread
        self.router = Router()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, x):
        weights = self.router(x)
        y = sum(weights[:, e, None] * expert(x) for e, expert in enumerate(self.experts))
        if not self.spread:  # else after the step
            balance(self.router)
        return x + y


@torch.no_grad()
def balance(router):
    router.expert_bias += RATE * torch.sign(router.load.mean() - router.load)
    router.load = torch.zeros(EXPERTS)


def twin():
    torch.manual_seed(831)
    return Moe()


def model(twin):
    net = Moe(spread=True)
    net.load_state_dict(twin.state_dict())
    return net


def batch():
    return tuple(torch.randn(2, 24, WIDTH, generator=torch.Generator().manual_seed(832)))


def mine(batch, rank, world):
    return tuple(v.chunk(world)[rank] for v in batch)


loss = F.mse_loss


def step(model, mine):
    value = loss(model(mine[0]), mine[1]) / WORLD
    value.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    if not WRONG:
        dist.all_reduce(model.router.load)
    balance(model.router)
    dist.all_reduce(total := value.detach().clone())
    return total


FAULT = {
    "parameter": [],
    "state": ["router.expert_bias"],
    "kind": "statistics per rank", "factor": None, "loss": "equal",
    "note": "the load is that of the rank's own tokens, so the biases of the ranks part; "
            "gradients of this step are right",
    "place": ["router", "dist.all_reduce(model.router.load)", "balance", "expert_bias"],
    "report": "pytorch/torchtitan#1114",
}  # fmt: skip
