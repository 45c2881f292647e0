"""Three stages by send and receive: the first one's result goes to both others, and the embedding
is tied to the output of the last one. Two microbatches, all forward and then all backward."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

torch.set_default_dtype(torch.float64)
WORLD = 3
WRONG = os.environ.get("CASE", "right") == "wrong"
PARTS, WIDTH, WORDS = 2, 4, 9
ENDS = {}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.a, self.b, self.c = (nn.Linear(n * WIDTH, WIDTH) for n in (1, 1, 2))

    def forward(self, ids):
        h = torch.tanh(self.a(self.table(ids)))
        k = torch.tanh(self.b(h))
        return torch.tanh(self.c(torch.cat([k, h], -1))) @ self.table.weight.T


class Stage(nn.Module):
    def __init__(self, names):
        super().__init__()
        whole = Net()
        for name in names:
            setattr(self, name, getattr(whole, name))


def twin():
    torch.manual_seed(991)
    return Net()


def model(twin):
    ENDS["group"] = dist.new_group([0, 2])
    net = Stage((("table", "a"), ("b",), ("table", "c"))[dist.get_rank()])
    values = twin.state_dict()
    net.load_state_dict({name: values[name] for name in net.state_dict()})
    return net


def batch():
    g = torch.Generator().manual_seed(992)
    return tuple(torch.randint(0, WORDS, (6, 3), generator=g) for _ in range(2))


def loss(logits, ids):
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


def received(shape, source):
    dist.recv(x := torch.empty(shape), source)
    return x.requires_grad_()


def step(model, mine):
    rank = dist.get_rank()
    kept, total = [], torch.zeros(())
    for ids, target in zip(*(v.chunk(PARTS) for v in mine), strict=True):
        shape = (*ids.shape, WIDTH)
        if rank == 0:
            h = torch.tanh(model.a(model.table(ids)))
            dist.send(h.detach(), 1)
            dist.send(h.detach(), 2)
            kept.append((h,))
        elif rank == 1:
            h = received(shape, 0)
            k = torch.tanh(model.b(h))
            dist.send(k.detach(), 2)
            kept.append((h, k))
        else:
            h, k = received(shape, 0), received(shape, 1)
            logits = torch.tanh(model.c(torch.cat([k, h], -1))) @ model.table.weight.T
            value = loss(logits, target) / PARTS
            total += value.detach()
            kept.append((h, k, value))
    for number, tensors in enumerate(kept):
        if rank == 2:
            h, k, value = tensors
            value.backward()
            dist.send(k.grad, 1)
            dist.send(2 * h.grad if WRONG and number == 1 else h.grad, 0)
        elif rank == 1:
            h, k = tensors
            dist.recv(g := torch.empty_like(k), 2)
            k.backward(g)
            dist.send(h.grad, 0)
        else:
            (h,) = tensors
            dist.recv(one := torch.empty_like(h), 1)
            dist.recv(other := torch.empty_like(h), 2)
            h.backward(one + other)
    if rank != 1:
        dist.all_reduce(model.table.weight.grad, group=ENDS["group"])
    dist.broadcast(total, 2)
    return total


FAULT = {
    "parameter": ["table.weight", "a.weight", "a.bias"],
    "kind": "other", "factor": None, "loss": "equal",
    "note": "the last stage sends twice the gradient of what skips a stage, in one microbatch",
    "place": ["2 * h.grad if WRONG"],
    "report": None,
}  # fmt: skip
