"""A tagger with a recurrent layer, data parallel; sequences are padded, and ranks have other
numbers of tokens."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

torch.set_default_dtype(torch.float64)

WORLD = 3
WRONG = os.environ.get("CASE", "right") == "wrong"
LENGTHS = [7, 6, 2, 3, 1, 2]


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, 5, padding_idx=0)
        self.rnn = nn.GRU(5, 4, batch_first=True)
        self.tag = nn.Linear(4, 3)

    def forward(self, ids):
        return self.tag(self.rnn(self.embedding(ids))[0])


def twin():
    torch.manual_seed(1141)
    return Tagger()


def model(twin):
    (net := Tagger()).load_state_dict(twin.state_dict())
    return net


def batch():
    g = torch.Generator().manual_seed(1142)
    ids = torch.randint(1, 9, (6, 7), generator=g)
    tags = torch.randint(0, 3, (6, 7), generator=g)
    padding = torch.arange(7) >= torch.tensor(LENGTHS)[:, None]
    return ids.masked_fill(padding, 0), tags.masked_fill(padding, -100)


def mine(batch, rank, world):
    return tuple(v.chunk(world)[rank] for v in batch)


def loss(logits, tags):
    return F.cross_entropy(logits.transpose(1, 2), tags, label_smoothing=0.1)


def step(model, mine):
    ids, tags = mine
    share = (tags != -100).sum() / sum(LENGTHS)
    value = loss(model(ids), tags) * (1 / WORLD if WRONG else share)
    value.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    dist.all_reduce(total := value.detach().clone())
    return total


FAULT = {
    "parameter": ["embedding.weight", "rnn.weight_ih_l0", "rnn.weight_hh_l0", "rnn.bias_ih_l0",
                  "rnn.bias_hh_l0", "tag.weight", "tag.bias"],
    "kind": "mean of unequal means", "factor": None, "loss": "differs",
    "note": "each rank's mean counts the same, whatever the number of its tokens",
    "place": ["value = loss(model(ids), tags)"],
    "report": None,
}  # fmt: skip
