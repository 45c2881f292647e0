"""GPipe of torch.distributed.pipelining on two stages, with two rounds of gradient accumulation;
the loss function divides, so that all rounds together are a mean."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

torch.set_default_dtype(torch.float64)
WORLD = 2
WRONG = os.environ.get("CASE", "right") == "wrong"
MICRO, ROUNDS, SAMPLES = 2, 2, 8


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4))
        self.second = nn.Sequential(nn.Tanh(), nn.Linear(4, 2))

    def forward(self, x):
        return self.second(self.first(x))


def twin():
    torch.manual_seed(701)
    return Net()


class Half(nn.Module):
    """One stage; its parameters have the names of the whole net."""

    def __init__(self, net, name):
        super().__init__()
        self.name = name
        self.add_module(name, getattr(net, name))

    def forward(self, x):
        return getattr(self, self.name)(x)


def model(twin):
    net = Net()
    net.load_state_dict(twin.state_dict())
    return Half(net, ("first", "second")[dist.get_rank()])


def batch():
    g = torch.Generator().manual_seed(702)
    return torch.randn(SAMPLES, 3, generator=g), torch.randn(SAMPLES, 2, generator=g)


loss = F.mse_loss


def share(output, target):
    return loss(output, target) / (MICRO * ROUNDS)


def step(model, mine):
    stage = PipelineStage(model, dist.get_rank(), WORLD, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, MICRO, loss_fn=share, scale_grads=WRONG)
    total = torch.zeros(())
    for x, t in zip(*(v.chunk(ROUNDS) for v in mine), strict=True):
        losses = []
        if dist.get_rank() == 0:
            schedule.step(x)
        else:
            schedule.step(target=t, losses=losses)
        total += sum(value.detach() for value in losses)
    dist.broadcast(total, src=WORLD - 1)
    return total


FAULT = {
    "parameter": ["first.0.weight", "first.0.bias", "first.2.weight", "first.2.bias",
                  "second.1.weight", "second.1.bias"],
    "kind": "other", "factor": None, "loss": "equal",
    "note": "the schedule divides all gradients by the micro-batches at the end of each round: "
            "the loss is divided again, and the first round's gradients once more",
    "place": ["scale_grads=WRONG", "ScheduleGPipe", "schedule.step"],
    "report": "pytorch/torchtitan#1733",
}  # fmt: skip
