"""Row parallel linear of tensor parallelism, with DTensor weights and local computation: each
rank adds its share of the bias to its partial output, and the outputs are summed."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

torch.set_default_dtype(torch.float64)
WORLD = 2
WRONG = os.environ.get("CASE", "right") == "wrong"


class AddOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        dist.all_reduce(x := x.clone())
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.wi = nn.Linear(4, 8)
        self.wo = nn.Linear(8, 4)

    def forward(self, x):
        return self.wo(F.relu(self.wi(x)).square())


class LocalRow(nn.Module):
    def __init__(self, linear, mesh):
        super().__init__()
        self.degree = mesh.size()
        self.weight = nn.Parameter(
            DTensor.from_local(
                linear.weight.data.chunk(self.degree, 1)[mesh.get_local_rank()].clone(),
                mesh,
                [Shard(1)],
            )
        )
        self.bias = nn.Parameter(DTensor.from_local(linear.bias.data, mesh, [Replicate()]))

    def forward(self, h):
        bias = self.bias.to_local()
        if WRONG:
            bias = bias / self.degree
        else:
            bias = bias + (bias / self.degree - bias).detach()
        return AddOverRanks.apply(F.linear(h, self.weight.to_local(), bias))


def twin():
    torch.manual_seed(421)
    return Mlp()


def model(twin):
    net = Mlp()
    net.load_state_dict(twin.state_dict())
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
    parallelize_module(net, mesh, {"wi": ColwiseParallel()})
    net.wo = LocalRow(net.wo, mesh)
    return net


def batch():
    g = torch.Generator().manual_seed(422)
    return torch.randn(6, 4, generator=g), torch.randn(6, 4, generator=g)


loss = F.mse_loss


FAULT = {
    "parameter": ["wo.bias"],
    "kind": "factor 0.5", "factor": 0.5, "loss": "equal",
    "note": "the shares of the bias are a division that autograd follows: 1 / the 2 ranks of tp",
    "place": ["wo", "bias = bias / self.degree"],
    "report": "pytorch/torchtitan#4332",
}  # fmt: skip
