"""Linear attention with a ring of key-value states: rank r needs the states of the ranks before
it (causal by blocks), and receives them one after another from its neighbour."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

torch.set_default_dtype(torch.float64)
WORLD = 4
WRONG = os.environ.get("CASE", "right") == "wrong"
WIDTH, TOKENS = 3, 8


def rotate(x, by):
    """The tensor of rank - by; every rank hands its own to rank + by."""
    rank, out = dist.get_rank(), torch.empty_like(x)
    ops = [
        dist.P2POp(dist.isend, x.contiguous(), (rank + by) % WORLD),
        dist.P2POp(dist.irecv, out, (rank - by) % WORLD),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return out


class StatesBefore(torch.autograd.Function):
    """Sum of the states of all ranks before this one."""

    @staticmethod
    def forward(ctx, state):
        total, travelling = torch.zeros_like(state), state
        for turn in range(1, WORLD):
            travelling = rotate(travelling, 1)
            if turn <= dist.get_rank():
                total += travelling
        return total

    @staticmethod
    def backward(ctx, grad):
        total, travelling = torch.zeros_like(grad), grad
        for turn in range(1, WORLD):
            travelling = rotate(travelling, 1 if WRONG else -1)
            if turn < WORLD - dist.get_rank():
                total += travelling
        return total


class LinearAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def before(self, states):
        """[blocks, width, width] -> the sum of the blocks before each."""
        return states.cumsum(0) - states

    def forward(self, x):
        blocks = x.reshape(-1, TOKENS // WORLD, WIDTH)
        q, k, v = self.q(blocks), F.elu(self.k(blocks)) + 1, self.v(blocks)
        states = self.before(k.transpose(1, 2) @ v)
        within = (q @ k.transpose(1, 2)).tril() @ v
        return ((within + q @ states) * self.scale).flatten(0, 1)


class ParallelLinearAttention(LinearAttention):
    def before(self, states):
        return StatesBefore.apply(states)


def twin():
    torch.manual_seed(611)
    return LinearAttention()


def model(twin):
    (net := ParallelLinearAttention()).load_state_dict(twin.state_dict())
    return net


def batch():
    return tuple(torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(612)))


def mine(batch, rank, world):
    return tuple(v.chunk(world)[rank] for v in batch)


loss = F.mse_loss


def step(model, mine):
    value = loss(model(mine[0]), mine[1]) / WORLD
    value.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    dist.all_reduce(total := value.detach().clone())
    return total


FAULT = {
    "parameter": ["k.weight", "v.weight"],
    "kind": "other", "factor": None, "loss": "equal",
    "note": "gradients travel around the ring in the direction of the states, not against it: "
            "they reach other ranks than those the states came from",
    "place": ["rotate(travelling, 1 if WRONG else -1)", "StatesBefore", "before"],
    "report": None,
}  # fmt: skip
