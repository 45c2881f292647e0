"""Causal language model trained with DDP on padded sequences. The loss of a step is a mean over
the tokens that have a label, in all micro-batches and on all ranks."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.set_default_dtype(torch.float64)
WORLD = 2
WRONG = os.environ.get("CASE", "right") == "wrong"
VOCAB, WIDTH, STEPS, PAD = 8, 6, 2, -100


class Lm(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], dtype=torch.float64)
        return self.head(self.layer(self.embed(ids), src_mask=mask, is_causal=True))


def twin():
    torch.manual_seed(801)
    return Lm()


def model(twin):
    net = Lm()
    net.load_state_dict(twin.state_dict())
    return DistributedDataParallel(net)


def batch():
    g = torch.Generator().manual_seed(802)
    ids = torch.randint(0, VOCAB, (8, 7), generator=g)
    labels = ids[:, 1:].clone()
    for row, length in enumerate((6, 2, 5, 4, 1, 3, 2, 2)):
        labels[row, length:] = PAD
    return ids[:, :-1], labels


def mine(batch, rank, world):
    return tuple(v.chunk(world)[rank] for v in batch)


def loss(logits, labels, reduction="mean"):
    return F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=PAD, reduction=reduction
    )


def step(model, mine):
    items = (mine[1] != PAD).sum().double()
    if WRONG:
        scale = 1 / items  # of the micro-batches together
    else:
        dist.all_reduce(items)
        scale = WORLD / items
    total = torch.zeros(())
    micro = list(zip(*(v.chunk(STEPS) for v in mine), strict=True))
    for i, (ids, labels) in enumerate(micro):
        model.require_backward_grad_sync = i == STEPS - 1
        value = loss(model(ids), labels, "sum") * scale
        value.backward()
        total += value.detach() / WORLD
    dist.all_reduce(total)
    return total


FAULT = {
    "parameter": ["embed.weight", "layer.self_attn.in_proj_weight", "layer.self_attn.in_proj_bias",
                  "layer.self_attn.out_proj.weight", "layer.self_attn.out_proj.bias",
                  "layer.linear1.weight", "layer.linear1.bias", "layer.linear2.weight",
                  "layer.linear2.bias", "layer.norm1.weight", "layer.norm1.bias",
                  "layer.norm2.weight", "layer.norm2.bias", "head.weight"],
    "kind": "other", "factor": None, "loss": "differs", "accept": ["statistics per rank"],
    "note": "each rank divides by its own number of labels, and the ranks' means count the same",
    "place": ["scale = 1 / items", "items", "DistributedDataParallel"],
    "report": "huggingface/transformers#34242",
}  # fmt: skip
