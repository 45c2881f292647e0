"""Ring attention: tokens are cut over the ranks, keys and values travel around the ring in
forward and again in backward, together with their gradients. Softmax by running maximum and sum."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

torch.set_default_dtype(torch.float64)
WORLD = 4
WRONG = os.environ.get("CASE", "right") == "wrong"
WIDTH, TOKENS = 4, 8


def pass_on(*tensors):
    """Sends to the next rank of the ring, and returns what the previous one sent."""
    rank, out = dist.get_rank(), []
    for x in tensors:
        y = torch.empty_like(x)
        ops = [
            dist.P2POp(dist.isend, x.contiguous(), (rank + 1) % WORLD),
            dist.P2POp(dist.irecv, y, (rank - 1) % WORLD),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        out.append(y)
    return out


class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        top = torch.full((len(q), 1), -torch.inf)
        total, out = torch.zeros(len(q), 1), torch.zeros_like(q)
        ring_k, ring_v = k, v
        for _ in range(WORLD):
            scores = q @ ring_k.T / WIDTH**0.5
            new = torch.maximum(top, scores.amax(1, keepdim=True))
            p, shrink = (scores - new).exp(), (top - new).exp()
            total = total * shrink + p.sum(1, keepdim=True)
            out, top = out * shrink + p @ ring_v, new
            ring_k, ring_v = pass_on(ring_k, ring_v)
        out = out / total
        ctx.save_for_backward(q, k, v, out, top + total.log())
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, lse = ctx.saved_tensors
        delta = (grad * out).sum(1, keepdim=True)
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        ring_k, ring_v = k, v
        for _ in range(WORLD):
            now_k, now_v = (k, v) if WRONG else (ring_k, ring_v)
            p = (q @ now_k.T / WIDTH**0.5 - lse).exp()
            ds = p * (grad @ now_v.T - delta) / WIDTH**0.5
            dq, dk, dv = dq + ds @ now_k, dk + ds.T @ q, dv + p.T @ grad
            ring_k, ring_v, dk, dv = pass_on(ring_k, ring_v, dk, dv)
        return dq, dk, dv


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)

    def attend(self, q, k, v):
        return torch.softmax(q @ k.T / WIDTH**0.5, -1) @ v

    def forward(self, x):
        return x + self.o(self.attend(self.q(x), self.k(x), self.v(x)))


class ContextParallel(Attention):
    def attend(self, q, k, v):
        return RingAttention.apply(q, k, v)


def twin():
    torch.manual_seed(601)
    return Attention()


def model(twin):
    (net := ContextParallel()).load_state_dict(twin.state_dict())
    return net


def batch():
    return tuple(torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(602)))


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
    "parameter": ["q.weight", "k.weight", "v.weight"],
    "kind": "other", "factor": None, "loss": "equal",
    "note": "each turn of the backward ring computes with the rank's own keys and values, not "
            "with those that have just arrived",
    "place": ["(k, v) if WRONG else (ring_k, ring_v)", "RingAttention", "attend"],
    "report": "huggingface/diffusers#14265",
}  # fmt: skip
