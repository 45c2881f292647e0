"""A small GPT, run in parallel in three ways: put your model and its functions in their place."""

import copy
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

WORLD = 2  # ranks; without it, --workers says how many
WORDS, WIDTH, HEADS, TOKENS = 32, 16, 4, 6


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def attend(self, x):
        size = WIDTH // HEADS
        q, k, v = (f(x).unflatten(-1, (-1, size)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).flatten(2))

    def forward(self, x):
        x = x + self.attend(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words):
        x = self.table(words) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


# your model on one process, with the same values every time
def twin():
    torch.manual_seed(0)
    return GPT()


# what each rank runs, with the twin's values in tensors of its own
def model(twin):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    plan = {f"blocks.*.{name}": ColwiseParallel() for name in ("q", "k", "v", "up")}
    plan |= {f"blocks.*.{name}": RowwiseParallel() for name in ("proj", "down")}
    return parallelize_module(copy.deepcopy(twin), mesh, plan)


# the whole batch: what the model takes, and what the loss compares its result with
def batch():
    words = torch.randint(0, WORDS, (4, TOKENS + 1), generator=torch.Generator().manual_seed(1))
    return words[:, :-1], words[:, 1:]


def loss(logits, target):
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


# end of what is needed


# data parallel: each rank has a part of the batch
def part(batch, rank, world):
    return tuple(one.chunk(world)[rank] for one in batch)


def with_ddp(twin):
    return DistributedDataParallel(copy.deepcopy(twin))


def with_fsdp(twin):
    net = copy.deepcopy(twin)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(net, mesh=mesh)


ddp = SimpleNamespace(twin=twin, model=with_ddp, batch=batch, loss=loss, mine=part)
fsdp = SimpleNamespace(twin=twin, model=with_fsdp, batch=batch, loss=loss, mine=part)
