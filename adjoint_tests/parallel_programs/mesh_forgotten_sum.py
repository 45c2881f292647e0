"""Two transformer-like blocks, cut over the tensor-parallel axis of a mesh and replicated over the
data-parallel one."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

torch.set_default_dtype(torch.float64)
WORLD = 4
WRONG = os.environ.get("CASE", "right") == "wrong"
WIDTH, TOKENS, WORDS = 6, 4, 9
GROUPS = {}


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        dist.all_reduce(g := g.clone(), group=GROUPS["tp"])
        return g


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        dist.all_reduce(x := x.clone(), group=GROUPS["tp"])
        return x

    @staticmethod
    def backward(ctx, g):
        return g


class Block(nn.Module):
    def __init__(self, n=1):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate, self.up = (nn.Linear(WIDTH, 4 * WIDTH // n, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * WIDTH // n, WIDTH, bias=False)

    def enter(self, x):
        return x

    def leave(self, x):
        return x

    def forward(self, x):
        h = self.enter(self.norm(x))
        return x + self.leave(self.down(F.silu(self.gate(h)) * self.up(h)))


class CutBlock(Block):
    forgets = False

    def enter(self, x):
        return x if self.forgets else Enter.apply(x)

    def leave(self, x):
        return Leave.apply(x)


class Model(nn.Module):
    def __init__(self, block=Block, n=1):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.block = nn.ModuleList(block(n) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids):
        x = self.words(ids)
        for block in self.block:
            x = block(x)
        return self.head(self.norm(x))


def twin():
    torch.manual_seed(981)
    return Model()


def shard(name, value, rank, world):
    dim = {"gate": 0, "up": 0, "down": 1}.get(name.split(".")[-2])
    return value if dim is None else value.chunk(2, dim)[rank % 2]


def model(twin):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    GROUPS.update({name: mesh[name].get_group() for name in ("dp", "tp")})
    net = Model(CutBlock, 2)
    net.block[1].forgets = WRONG
    with torch.no_grad():
        for name, p in net.named_parameters():
            p.copy_(shard(name, twin.get_parameter(name), dist.get_rank(), WORLD))
    return net


def batch():
    ids = torch.randint(0, WORDS, (4, TOKENS + 1), generator=torch.Generator().manual_seed(982))
    return ids[:, :-1], ids[:, 1:]


def mine(batch, rank, world):
    return tuple(v.chunk(2)[rank // 2] for v in batch)


def loss(logits, ids):
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


def step(model, mine):
    value = loss(model(mine[0]), mine[1])
    value.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, group=GROUPS["dp"])
        p.grad /= 2
    dist.all_reduce(value := value.detach().clone(), group=GROUPS["dp"])
    return value / 2


FAULT = {
    "parameter": ["words.weight", "block.0.norm.weight", "block.0.norm.bias", "block.0.gate.weight",
                  "block.0.up.weight", "block.0.down.weight", "block.1.norm.weight",
                  "block.1.norm.bias"],
    "kind": "other", "factor": None, "loss": "equal",
    "note": "the second block does not sum the gradient of its input over tp; the sums over dp are "
            "right, and what is before that block follows",
    "place": ["block.1.gate", "block.1.up", "Enter.apply(x)"],
    "report": None,
}  # fmt: skip
