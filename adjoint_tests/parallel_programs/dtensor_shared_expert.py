"""A layer of routed and shared experts. The routed ones are plain tensors, cut over the ranks,
the shared one is a DTensor, cut by columns and rows; both read the same normalised input."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

torch.set_default_dtype(torch.float64)
WORLD = 2
WRONG = os.environ.get("CASE", "right") == "wrong"
WIDTH, HIDDEN = 4, 6


class CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        dist.all_reduce(grad := grad.clone())
        return grad


class Layer(nn.Module):
    def __init__(self, hidden=HIDDEN):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.routed_in = nn.Linear(WIDTH, hidden, bias=False)
        self.routed_out = nn.Linear(hidden, WIDTH, bias=False)
        self.shared_in = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.shared_out = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        h = self.norm(x)
        routed = self.routed_out(F.gelu(self.routed_in(h)))
        return x + routed + self.shared_out(F.silu(self.shared_in(h)))


class ParallelLayer(Layer):
    def __init__(self):
        super().__init__(HIDDEN // WORLD)
        self.mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))

    def forward(self, x):
        h = CopyToRanks.apply(self.norm(x))
        routed = self.routed_out(F.gelu(self.routed_in(h)))
        kept = None if WRONG else [Partial()]
        shared = DTensor.from_local(h, self.mesh, [Replicate()], grad_placements=kept)
        shared = self.shared_out(F.silu(self.shared_in(shared)))
        both = DTensor.from_local(routed, self.mesh, [Partial()]) + shared
        return x + both.redistribute(self.mesh, [Replicate()]).to_local()


def twin():
    torch.manual_seed(411)
    return Layer()


def shard(name, value, rank, world):
    dim = {"routed_in.weight": 0, "routed_out.weight": 1}.get(name)
    return value if dim is None else value.chunk(world, dim)[rank]


def model(twin):
    net = ParallelLayer()
    state = {k: shard(k, v, dist.get_rank(), WORLD) for k, v in twin.state_dict().items()}
    net.load_state_dict(state)
    for linear, dim in ((net.shared_in, 0), (net.shared_out, 1)):
        weight = distribute_tensor(linear.weight.data, net.mesh, [Shard(dim)])
        linear.weight = nn.Parameter(weight)
    return net


def batch():
    return tuple(torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(412)))


loss = F.mse_loss


FAULT = {
    "parameter": ["norm.weight", "norm.bias"],
    "kind": "other", "factor": None, "loss": "equal",
    "note": "from_local sums the shared expert's input gradient over tp, and the function before "
            "it sums it again: that branch counts 2 times",
    "place": ["DTensor.from_local(h, self.mesh, [Replicate()]", "shared_in", "CopyToRanks"],
    "report": "pytorch/torchtitan#2416",
}  # fmt: skip
