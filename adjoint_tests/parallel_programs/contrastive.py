"""Contrastive training of two towers: features are gathered from all ranks, and every
rank computes the loss of the whole batch."""

import os

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_fn
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.set_default_dtype(torch.float64)
WORLD = 2
WRONG = os.environ.get("CASE", "right") == "wrong"
WIDTH = 5


class Clip(nn.Module):
    """Features of images and texts, and the scale of their products."""

    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, WIDTH))
        self.text = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, WIDTH))
        self.logit_scale = nn.Parameter(torch.tensor([1.0, 0.5]))

    def forward(self, x):
        images, texts = x.split([6, 4], -1)
        features = F.normalize(self.image(images), dim=-1), F.normalize(self.text(texts), dim=-1)
        return *features, self.logit_scale


def twin():
    torch.manual_seed(791)
    return Clip()


def model(twin):
    (net := Clip()).load_state_dict(twin.state_dict())
    return DistributedDataParallel(net)


def batch():
    g = torch.Generator().manual_seed(792)
    return torch.randn(6, 10, generator=g), torch.arange(6)


def mine(batch, rank, world):
    return tuple(v.chunk(world)[rank] for v in batch)


def loss(features, target):
    image, text, (scale, shift) = features
    logits = scale.exp() * image @ text.T + shift * image.sum(1, keepdim=True)
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def gather(features):
    if not WRONG:
        return torch.cat(dist_fn.all_gather(features))
    parts = [torch.empty_like(features) for _ in range(WORLD)]
    dist.all_gather(parts, features.detach())
    parts[dist.get_rank()] = features  # puts the own ones back into the graph
    return torch.cat(parts)


def step(model, mine):
    image, text, scale = model(mine[0])
    images, texts = gather(image), gather(text)
    value = loss((images, texts, scale), torch.arange(len(images)))
    value.backward()
    dist.all_reduce(total := value.detach() / WORLD)
    return total


FAULT = {
    "parameter": ["image.0.weight", "image.0.bias", "image.2.weight", "image.2.bias",
                  "text.0.weight", "text.0.bias", "text.2.weight", "text.2.bias"],
    "kind": "factor 0.5", "factor": 0.5, "loss": "equal",
    "note": "a rank's features get the gradient of its own loss alone, not of the loss of the "
            "other, and DDP averages over the 2 ranks; the scale, which is not gathered, is right",
    "place": ["dist.all_gather(parts, features.detach())", "gather",
              "parts[dist.get_rank()] = features"],
    "report": "mlfoundations/open_clip#616",
}  # fmt: skip
