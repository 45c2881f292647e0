"""FSDP2 training of a small tagger whose loss is a mean over all labelled tokens of the batch.
Padding is ignored; the ranks have different numbers of labels, so the sum is
divided by the total."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

torch.set_default_dtype(torch.float64)
WORLD = 2
WRONG = os.environ.get("CASE", "right") == "wrong"
VOCAB, WIDTH, TAGS, IGNORE = 11, 6, 4, -100


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.tags = nn.Linear(WIDTH, TAGS)

    def forward(self, ids):
        h = self.embed(ids)
        for layer in self.layers:
            h = h + torch.tanh(layer(h))
        return self.tags(h)


def twin():
    torch.manual_seed(301)
    return Tagger()


def model(twin):
    net = Tagger()
    net.load_state_dict(twin.state_dict())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    for layer in net.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net


def batch():
    g = torch.Generator().manual_seed(302)
    ids = torch.randint(0, VOCAB, (4, 5), generator=g)
    tags = torch.randint(0, TAGS, (4, 5), generator=g)
    for row, length in enumerate((5, 4, 2, 3)):
        tags[row, length:] = IGNORE
    return ids, tags


def mine(batch, rank, world):
    return tuple(v.chunk(world)[rank] for v in batch)


def loss(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=IGNORE)


def step(model, mine):
    ids, tags = mine
    tokens = (tags != IGNORE).sum()
    dist.all_reduce(tokens)
    logits = model(ids).flatten(0, 1)
    total = F.cross_entropy(logits, tags.flatten(), ignore_index=IGNORE, reduction="sum") / tokens
    scale = 1 if WRONG else dist.get_world_size()
    (total * scale).backward()
    dist.all_reduce(value := total.detach().clone())
    return value


FAULT = {
    "parameter": ["embed.weight", "layers.0.weight", "layers.0.bias", "layers.1.weight",
                  "layers.1.bias", "tags.weight", "tags.bias"],
    "kind": "factor 0.5", "factor": 0.5, "loss": "equal",
    "note": "the loss is divided by the tokens of all ranks, and FSDP averages over dp besides",
    "place": ["scale = 1 if WRONG", "(total * scale).backward()", "fully_shard"],
    "report": "meta-pytorch/torchtune#2172",
}  # fmt: skip
