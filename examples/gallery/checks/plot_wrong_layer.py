"""
Name the layer whose gradient is wrong in a parallel model
==========================================================

A model is split over two GPUs as Megatron does it: an MLP whose first layer is cut in
columns and whose second in rows. The loss is that of the model on one GPU, and training is
a little worse. One check runs a step of both, and says which gradients differ, by what, and
in which line the message is that is missing, or too many.
"""

import textwrap

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import linop

# %%
# The program
# -----------
# It uses torch alone. Behind the split layers their parts are summed, by an all-reduce. Its
# author took care of the backward pass, too: gradients are summed there, as well.


def total(x):
    dist.all_reduce(x := x.clone())
    return x


class Sum(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: total(x))
    backward = staticmethod(lambda ctx, grad: total(grad))


class Net(nn.Module):
    def __init__(self, hidden=8):
        super().__init__()
        self.inp, self.out = nn.Linear(5, 6), nn.Linear(6, 3)
        self.up, self.down = nn.Linear(6, hidden), nn.Linear(hidden, 6, bias=False)

    def mlp(self, x):
        return self.down(functional.gelu(self.up(x)))

    def forward(self, x):
        return self.out(self.mlp(torch.tanh(self.inp(x))))


class ParallelNet(Net):
    def mlp(self, x):
        return Sum.apply(super().mlp(x))


# %%
# What the check needs
# --------------------
# The model on one process, its part on each rank, a batch and a loss.


def twin():
    torch.manual_seed(0)
    return Net()


def shard(name, value, rank, world):
    dim = {"up.weight": 0, "up.bias": 0, "down.weight": 1}.get(name)
    return value if dim is None else value.chunk(world, dim)[rank]


def model(twin):
    rank, world = dist.get_rank(), dist.get_world_size()
    net = ParallelNet(8 // world)
    net.load_state_dict({k: shard(k, v, rank, world) for k, v in twin.state_dict().items()})
    return net


def batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(4, 5, generator=generator), torch.randn(4, 3, generator=generator)


found = linop.testing.check_parallel(model, twin, batch, functional.mse_loss, shard=shard)
for line in str(found).splitlines():
    print(textwrap.fill(line, 96, subsequent_indent=" " * 8))

# %%
# Two faults
# ----------
# The loss is right, and so is the output layer. The split layers' gradients are twice too
# large: the adjoint of a sum *to all* is a copy. And the input layer gets on each rank what
# its half of the MLP sends back, and nobody adds the halves: the adjoint of a copy *to all*
# is a sum. Megatron's f and g are these two.

assert not found and found.loss_is_equal
kinds = {name: str(one.kind) for name, one in found.parameters.items()}
assert (
    kinds["inp.weight"] == "terms that were not summed" and kinds["up.weight"] == "a factor"
)
assert kinds["out.weight"] == "equal"

figure, panel = plt.subplots(figsize=(8, 4), layout="constrained")
order = (
    "inp.weight",
    "inp.bias",
    "up.weight",
    "up.bias",
    "down.weight",
    "out.weight",
    "out.bias",
)
for row, name in enumerate(order):
    verdict = found.parameters[name]
    equal = kinds[name] == "equal"
    panel.barh(row, 1, color="C2" if equal else "C3", alpha=0.35)
    panel.text(0.02, row, f"{'✓' if equal else '✗'}  {verdict}", va="center")
panel.set_yticks(range(len(order)), order)
panel.invert_yaxis()
panel.set(xlim=(0, 1), xticks=[], title="gradients beside those of one process")
plt.show()

# %%
# Read on: :doc:`/parallel_models`.
