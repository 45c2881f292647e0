"""Switch routing with an auxiliary loss that balances the experts: the share of tokens of each
expert times its mean probability, over the tokens of all ranks. Data parallel."""

import os

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_fn
import torch.nn.functional as F
from torch import nn

torch.set_default_dtype(torch.float64)
WORLD = 2
WRONG = os.environ.get("CASE", "right") == "wrong"
EXPERTS, WIDTH, COEFFICIENT = 3, 4, 0.5


def everyone(x):
    dist.all_reduce(x := x.clone())
    return x


class Switch(nn.Module):
    def __init__(self, spread=False):
        super().__init__()
        self.spread = spread
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, x):
        p = torch.softmax(self.router(x), -1)
        value, index = p.max(-1)
        outputs = torch.stack([torch.relu(expert(x)) for expert in self.experts], 1)
        y = value[:, None] * outputs[torch.arange(len(x)), index]
        return y, self.balance(p, torch.bincount(index, minlength=EXPERTS).double())

    def balance(self, p, counts):
        """The rank's share of the auxiliary loss; a sum over the ranks is the whole of it."""
        if self.spread:
            tokens = everyone(torch.tensor(float(len(p))))
            if WRONG:
                dist_fn.all_reduce(counts)
            else:
                dist.all_reduce(counts)
            shares = counts / counts.sum()
            return EXPERTS * (shares * p.sum(0) / tokens).sum()
        return EXPERTS * (counts / len(p) * p.mean(0)).sum()


def twin():
    torch.manual_seed(841)
    return Switch()


def model(twin):
    net = Switch(spread=True)
    net.load_state_dict(twin.state_dict())
    return net


def batch():
    return tuple(torch.randn(2, 12, WIDTH, generator=torch.Generator().manual_seed(842)))


def mine(batch, rank, world):
    return tuple(v.chunk(world)[rank] for v in batch)


def loss(output, target):
    y, balance = output
    return F.mse_loss(y, target) + COEFFICIENT * balance


def step(model, mine):
    y, balance = model(mine[0])
    value = F.mse_loss(y, mine[1]) / WORLD + COEFFICIENT * balance
    value.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    return everyone(value.detach())


FAULT = {
    "parameter": ["router.weight"],
    "kind": "statistics per rank", "factor": None, "loss": "differs",
    "note": "the function of torch.distributed.nn returns the sum of the counts and leaves its "
            "argument as it is: the experts' shares are those of the rank's own tokens",
    "place": ["dist_fn.all_reduce(counts)", "balance", "router"],
    "report": "microsoft/ltp-megatron-lm#68",
}  # fmt: skip
