"""Data parallel regression in DTensors alone: parameters replicated, samples cut over the ranks,
and the loss is a DTensor, made whole before the backward pass."""

import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor

torch.set_default_dtype(torch.float64)
WORLD = 2
WRONG = os.environ.get("CASE", "right") == "wrong"


def build():
    return nn.Sequential(nn.Linear(4, 6), nn.Sigmoid(), nn.Linear(6, 2))


def twin():
    torch.manual_seed(451)
    return build()


def model(twin):
    net = build()
    net.load_state_dict(twin.state_dict())
    net.mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("dp",))
    return distribute_module(net, net.mesh)  # replicated


def batch():
    g = torch.Generator().manual_seed(452)
    return torch.randn(8, 4, generator=g), torch.randn(8, 2, generator=g)


loss = F.mse_loss


def step(model, mine):
    x, t = (distribute_tensor(v, model.mesh, [Shard(0)]) for v in mine)
    y = model(x)
    if WRONG:
        value = loss(y, t)
    else:
        value = loss(y, t, reduction="sum") / t.numel()
    value = value.redistribute(placements=[Replicate()])
    value.backward()
    return value.detach().to_local()


FAULT = {
    "parameter": ["0.weight", "0.bias", "2.weight", "2.bias"],
    "kind": "factor 2", "factor": 2.0, "loss": "equal",
    "note": "the mean of cut samples is a DTensor of means to be averaged; on the way back each "
            "rank divides by its own number of samples, and the 2 ranks of dp are summed",
    "place": ["value = loss(y, t)", "redistribute(placements=[Replicate()])", "mse_loss"],
    "report": None,
}  # fmt: skip
