"""Language model whose embedding is cut by the vocabulary."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

WORLD = 2
VOCABULARY, WIDTH = 10, 4


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, ids):
        return self.out(torch.tanh(self.embed(ids)))


# wrong
class NotMasked(nn.Embedding):
    def forward(self, ids):
        first = dist.get_rank() * self.num_embeddings
        inside = (ids >= first) & (ids < first + self.num_embeddings)
        rows = super().forward((ids - first) * inside)  # row 0 for tokens of other ranks
        dist.all_reduce(rows)
        return rows


# right
class Masked(nn.Embedding):
    def forward(self, ids):
        first = dist.get_rank() * self.num_embeddings
        inside = (ids >= first) & (ids < first + self.num_embeddings)
        rows = super().forward((ids - first) * inside) * inside[..., None]
        dist.all_reduce(rows)
        return rows


# end
ParallelEmbedding = NotMasked if os.environ.get("CASE") == "wrong" else Masked


def twin():
    torch.manual_seed(0)
    return Net()


def model(twin):
    rank, world = dist.get_rank(), dist.get_world_size()
    net = Net()
    net.embed = ParallelEmbedding(VOCABULARY // world, WIDTH)
    values = twin.state_dict()
    values["embed.weight"] = values["embed.weight"].chunk(world)[rank]
    net.load_state_dict(values)
    return net


def batch():
    ids = torch.tensor([[0, 5, 3], [9, 4, 5], [7, 1, 8]])
    return ids, torch.tensor([[0, 1, 2], [2, 0, 1], [1, 1, 0]])


def loss(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())
