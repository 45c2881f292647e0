"""Two pipeline stages in two replicas (2 x 2), with a distributed optimizer: each replica owns
half of the flat gradients. The token table is on both stages; its copies' gradients are added
up."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

torch.set_default_dtype(torch.float64)
WORLD = 4
WRONG = os.environ.get("CASE", "right") == "wrong"
VOCAB, WIDTH = 6, 4


class Lm(nn.Module):
    def __init__(self, stages=(0, 1)):
        super().__init__()
        self.wte = nn.Embedding(VOCAB, WIDTH)
        if 0 in stages:
            self.first = nn.Linear(WIDTH, WIDTH)
        if 1 in stages:
            self.second = nn.Linear(WIDTH, WIDTH)

    def bottom(self, ids):
        return torch.relu(self.first(self.wte(ids)))

    def top(self, h):
        return torch.sigmoid(self.second(h)) @ self.wte.weight.T

    def forward(self, ids):
        return self.top(self.bottom(ids))


def twin():
    torch.manual_seed(741)
    return Lm()


def model(twin):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    net = Lm(stages=(mesh["pp"].get_local_rank(),))
    net.load_state_dict({k: v for k, v in twin.state_dict().items() if k in net.state_dict()})
    net.mesh = mesh
    return net


def batch():
    g = torch.Generator().manual_seed(742)
    return torch.randint(0, VOCAB, (2, 12), generator=g).unbind()


def mine(batch, rank, world):
    return tuple(v.chunk(2)[rank // 2] for v in batch)


loss = F.cross_entropy


def flattened(model):
    """Parameters in the order of the flat buffer, its gradients, and the half that is owned."""
    parameters = list(model.parameters())
    if model.mesh["pp"].get_local_rank():
        parameters.reverse()  # the last stage fills its buffer from the head
    flat = torch.cat([p.grad.flatten() for p in parameters])
    half = len(flat) // 2
    return parameters, flat, slice(half, None) if dist.get_rank() // 2 else slice(0, half)


def write(parameters, flat):
    for p, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        p.grad = part.view_as(p).clone()


def reduce_scatter(model):
    """Averages over the replicas, of which each keeps its own half; the rest stays as it is."""
    parameters, flat, own = flattened(model)
    mean = flat / 2
    dist.all_reduce(mean, group=model.mesh["dp"].get_group())
    flat[own] = mean[own]
    write(parameters, flat)


def all_gather(model):
    """The owners' halves to both replicas."""
    parameters, flat, own = flattened(model)
    whole = torch.zeros_like(flat)
    whole[own] = flat[own]
    dist.all_reduce(whole, group=model.mesh["dp"].get_group())
    write(parameters, whole)


def add_tied(model):
    dist.all_reduce(model.wte.weight.grad, group=model.mesh["pp"].get_group())


def step(model, mine):
    (ids, target), stage = mine, model.mesh["pp"].get_local_rank()
    value, peer = torch.zeros(()), dist.get_rank() ^ 1
    if stage == 0:
        h = model.bottom(ids)
        dist.send(h.detach(), dst=peer)
        dist.recv(grad := torch.empty_like(h), src=peer)
        h.backward(grad)
    else:
        dist.recv(h := torch.empty(len(ids), WIDTH), src=peer)
        value = loss(model.top(h.requires_grad_()), target)
        value.backward()
        dist.send(h.grad, dst=peer)
    order = (reduce_scatter, add_tied) if WRONG else (add_tied, reduce_scatter)
    for finish in (*order, all_gather):
        finish(model)
    dist.all_reduce(total := value.detach() / 2)
    return total


FAULT = {
    "parameter": ["wte.weight"],
    "kind": "other", "factor": None, "loss": "equal", "accept": ["sum over the wrong group"],
    "note": "halves are averaged over dp first, and the table's two copies lie in different "
            "halves: the sum over pp then adds reduced values to others that are not",
    "place": ["wte", "add_tied", "order = (reduce_scatter, add_tied)", "reduce_scatter"],
    "report": "NVIDIA/Megatron-LM#844",
}  # fmt: skip
