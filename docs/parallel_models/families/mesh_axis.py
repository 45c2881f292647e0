"""Four ranks as a mesh: two replicas ("dp") of an MLP that is split over two ranks ("tp")."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

WORLD = 4


class Net(nn.Module):
    def __init__(self, hidden=6):
        super().__init__()
        self.up, self.down = nn.Linear(3, hidden), nn.Linear(hidden, 2, bias=False)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


class MeshNet(Net):
    def __init__(self):
        super().__init__(6 // 2)
        self.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def forward(self, x):
        y = super().forward(x)
        dist.all_reduce(y, group=self.mesh.get_group("tp"))
        return y


# wrong
def average_over_tp(model):
    for p in model.parameters():
        dist.all_reduce(p.grad, group=model.mesh.get_group("tp"))
        p.grad /= 2


# right
def average_over_dp(model):
    for p in model.parameters():
        dist.all_reduce(p.grad, group=model.mesh.get_group("dp"))
        p.grad /= 2


# end
average = average_over_tp if os.environ.get("CASE") == "wrong" else average_over_dp


def step(model, mine):
    x, target = mine
    value = loss(model(x), target)
    value.backward()
    average(model)
    return value


def twin():
    torch.manual_seed(0)
    return Net()


def shard(name, value, rank, world):
    return value.chunk(2, dim=1 if name == "down.weight" else 0)[rank % 2]


def model(twin):
    net, rank = MeshNet(), dist.get_rank()
    net.load_state_dict({k: shard(k, v, rank, WORLD) for k, v in twin.state_dict().items()})
    return net


def batch():
    g = torch.Generator().manual_seed(1)
    return torch.randn(6, 3, generator=g), torch.randn(6, 2, generator=g)


def mine(batch, rank, world):
    return tuple(one.chunk(2)[rank // 2] for one in batch)


loss = F.mse_loss
