"""1F1B pipeline of torch.distributed.pipelining with a sum over labelled tokens as loss, which
is divided by the number of tokens of the batch."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

torch.set_default_dtype(torch.float64)
WORLD = 2
WRONG = os.environ.get("CASE", "right") == "wrong"
VOCAB, WIDTH, MICRO = 7, 4, 4


class Lm(nn.Module):
    def __init__(self, stages=(0, 1)):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH) if 0 in stages else None
        self.mix = nn.ModuleDict({str(i): nn.Linear(WIDTH, WIDTH) for i in stages})
        self.head = nn.Linear(WIDTH, VOCAB) if 1 in stages else None

    def forward(self, h):
        h = self.embed(h) if self.embed else h
        for layer in self.mix.values():
            h = h + torch.tanh(layer(h))
        return self.head(h) if self.head else h


def twin():
    torch.manual_seed(711)
    return Lm()


def model(twin):
    net = Lm(stages=(dist.get_rank(),))
    net.load_state_dict({k: v for k, v in twin.state_dict().items() if k in net.state_dict()})
    return net


def batch():
    g = torch.Generator().manual_seed(712)
    ids = torch.randint(0, VOCAB, (8, 5), generator=g)
    target = ids.roll(-1, 1)
    target[:, -1] = -100
    return ids, target


def loss(logits, target):
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-100)


def step(model, mine):
    ids, target = mine
    tokens = (target != -100).sum()

    def token_sum(logits, part):
        value = F.cross_entropy(logits.flatten(0, 1), part.flatten(), reduction="sum")
        return value if WRONG else value / tokens

    stage = PipelineStage(model, dist.get_rank(), WORLD, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICRO, loss_fn=token_sum, scale_grads=False)
    losses = []
    if dist.get_rank() == 0:
        schedule.step(ids)
    else:
        schedule.step(target=target, losses=losses)
    total = sum((value.detach() for value in losses), torch.zeros(()))
    if WRONG:
        total = total / tokens
    dist.broadcast(total, src=1)
    return total


FAULT = {
    "parameter": ["embed.weight", "mix.0.weight", "mix.0.bias", "mix.1.weight", "mix.1.bias",
                  "head.weight", "head.bias"],
    "kind": "factor 32", "factor": 32.0, "loss": "equal",
    "note": "the schedule differentiates the sum over tokens; the division by their number, 32, "
            "comes after it, for the report alone",
    "place": ["return value if WRONG", "token_sum", "total = total / tokens"],
    "report": "pytorch/torchtitan#2972",
}  # fmt: skip
