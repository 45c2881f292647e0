"""Data parallel training of a scorer with DDP. The wrapped module has a method of its own that
computes the training loss, beside its forward for predictions."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.set_default_dtype(torch.float64)
WORLD = 2
WRONG = os.environ.get("CASE", "right") == "wrong"


class Scorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(4, 6)
        self.score = nn.Linear(6, 2)
        self.calibration = nn.Linear(6, 2)

    def forward(self, x, target=None):
        h = torch.tanh(self.encoder(x))
        return self.score(h) + torch.sigmoid(self.calibration(h))

    def compute_loss(self, x, target):
        return F.smooth_l1_loss(self(x), target)


class Training(nn.Module):
    """The module that DDP wraps: its forward is the loss."""

    def __init__(self, net):
        super().__init__()
        self.module = net

    def forward(self, x, target):
        return self.module.compute_loss(x, target)


def twin():
    torch.manual_seed(351)
    return Scorer()


def model(twin):
    net = Scorer()
    net.load_state_dict(twin.state_dict())
    return DistributedDataParallel(Training(net))


def batch():
    g = torch.Generator().manual_seed(352)
    return torch.randn(8, 4, generator=g), torch.randn(8, 2, generator=g)


def mine(batch, rank, world):
    return tuple(v.chunk(world)[rank] for v in batch)


loss = F.smooth_l1_loss


def step(model, mine):
    x, t = mine
    if WRONG:
        value = model.module.module.compute_loss(x, t)
    else:
        value = model(x, t)
    value.backward()
    total = value.detach() / dist.get_world_size()
    dist.all_reduce(total)
    return total


FAULT = {
    "parameter": ["encoder.weight", "encoder.bias", "score.weight", "score.bias",
                  "calibration.weight", "calibration.bias"],
    "kind": "missing sum over 2 ranks", "factor": None, "loss": "equal",
    "note": "the loss is computed by the module inside of DDP, which then never reduces; DDP's "
            "sum is a mean, so the ranks' gradients sum to 2 times the twin's",
    "place": ["model.module.module.compute_loss(x, t)", "DistributedDataParallel"],
    "report": "OpenTSLM/OpenTSLM#49",
}  # fmt: skip
