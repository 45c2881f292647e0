"""Training with a module whose parameters are replicated DTensors. Each rank loads its own
samples, and hands them to the module as a DTensor."""

import os

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module

torch.set_default_dtype(torch.float64)
WORLD = 2
WRONG = os.environ.get("CASE", "right") == "wrong"
SAMPLES = 8


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
        self.decode = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 5))

    def forward(self, x):
        return self.decode(self.encode(x))


def twin():
    torch.manual_seed(961)
    return Autoencoder()


def model(twin):
    net = Autoencoder()
    net.load_state_dict(twin.state_dict())
    net.mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("dp",))
    return distribute_module(net, net.mesh)


def batch():
    x = torch.randn(SAMPLES, 5, generator=torch.Generator().manual_seed(962))
    return x, x


def mine(batch, rank, world):
    return tuple(v.chunk(world)[rank] for v in batch)


def loss(output, target):
    return (output - target).square().sum() / SAMPLES


def step(model, mine):
    layout = [Replicate()] if WRONG else [Shard(0)]
    x, t = (DTensor.from_local(v, model.mesh, layout) for v in mine)
    value = loss(model(x), t)
    value.backward()
    return value.detach().full_tensor()


FAULT = {
    "parameter": ["encode.0.weight", "encode.0.bias", "encode.2.weight", "encode.2.bias",
                  "decode.0.weight", "decode.0.bias", "decode.2.weight", "decode.2.bias"],
    "kind": "missing sum over 2 ranks", "factor": None, "loss": "differs",
    "note": "the rank's samples are declared to be those of all ranks, so neither the loss nor a "
            "gradient is summed over dp",
    "place": ["layout = [Replicate()] if WRONG", "DTensor.from_local(v, model.mesh, layout)"],
    "report": None,
}  # fmt: skip
