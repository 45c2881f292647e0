"""Classifier of long texts: tokens are cut over the ranks, each encodes its own, and their mean
over all ranks goes to the head. Every rank has an equal share of the loss; gradients are summed."""

import os

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_fn
import torch.nn.functional as F
from torch import nn

torch.set_default_dtype(torch.float64)
WORLD = 4
WRONG = os.environ.get("CASE", "right") == "wrong"
VOCAB, WIDTH, TOKENS, CLASSES = 9, 5, 8, 3


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.encode = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def total(self, h):
        return h

    def forward(self, ids):
        h = torch.tanh(self.encode(self.embed(ids)))
        return self.head(self.total(h.sum(1)) / TOKENS)


class SpreadClassifier(Classifier):
    def total(self, h):
        if WRONG:
            dist.all_reduce(h)
            return h
        return dist_fn.all_reduce(h)


def twin():
    torch.manual_seed(991)
    return Classifier()


def model(twin):
    (net := SpreadClassifier()).load_state_dict(twin.state_dict())
    return net


def batch():
    g = torch.Generator().manual_seed(992)
    ids = torch.randint(0, VOCAB, (6, TOKENS), generator=g)
    return ids, torch.randint(0, CLASSES, (6,), generator=g)


def mine(batch, rank, world):
    ids, target = batch
    return ids.chunk(world, 1)[rank], target


loss = F.cross_entropy


def step(model, mine):
    value = loss(model(mine[0]), mine[1]) / WORLD
    value.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    dist.all_reduce(total := value.detach().clone())
    return total


FAULT = {
    "parameter": ["embed.weight", "encode.weight", "encode.bias"],
    "kind": "factor 0.25", "factor": 0.25, "loss": "equal",
    "note": "the sum in place hands back the gradient of the rank's own share of the loss, 1 / "
            "the 4 ranks, instead of the sum of all shares",
    "place": ["dist.all_reduce(h)", "total", "self.total(h.sum(1))"],
    "report": "Dao-AILab/flash-attention#1244",
}  # fmt: skip
