"""Strategies of right programs that cut the batch: they take any of the models."""

from random import Random

from drawn.models import SQUARES

HEADER = '''"""Data parallel training: {what}."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
{imports}
torch.set_default_dtype(torch.float64)
WORLD = {world}


{net}

def twin():
    torch.manual_seed({seed})
    return Net()


{batch}

def mine(batch, rank, world):
    return tuple({cut} for v in batch)


{loss}

TOTAL = count(batch()[1])


{model}

{step}'''
STEP = """def step(model, mine):
#LOOK
    x, t = mine
    value = loss(model(x), t) * count(t) / TOTAL
    {backward}
{after}#WATCH
    dist.all_reduce(total := value.detach().clone())
    return total
"""
COPY = """def model(twin):
    net = Net()
    net.load_state_dict(twin.state_dict())
{rest}"""


def assemble(what, choice, model, step, *, imports="", cut=None, draw=None):
    part = choice["model"]
    cuts = ["v.tensor_split(world)[rank]", "v[rank::world]"]
    return HEADER.format(
        what=what,
        imports=imports,
        world=choice["world"],
        net=part["net"],
        seed=choice["seed"] + 1000,
        batch=part["batch"],
        cut=cut or draw.choice(cuts),
        loss=part["loss"],
        model=model,
        step=step,
    )


def by_hand(draw: Random, choice: dict) -> str:
    """Gradients are summed after the backward pass, one by one or in a flat buffer."""
    one = "    for p in model.parameters():\n        if p.grad is not None:\n"
    one += "            dist.all_reduce(p.grad)\n"
    flat = """    held = [p for p in model.parameters() if p.grad is not None]
    bucket = torch.cat([p.grad.flatten() for p in held])
    dist.all_reduce(bucket)
    for p, part in zip(held, bucket.split([p.numel() for p in held])):
        p.grad = part.view_as(p)
"""
    step = STEP.format(backward="value.backward()", after=draw.choice((one, flat)))
    start = "    for p in net.parameters():\n        dist.broadcast(p.data, src=0)\n"
    model = COPY.format(rest=draw.choice(("", start)) + "    return net\n")
    return assemble("sums by hand", choice, model, step, draw=draw)


def hooks(draw: Random, choice: dict) -> str:
    """Gradients are summed by hooks, as they come in."""
    rest = """    for p in net.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
    return net
"""
    started = """    net.started = []
    for p in net.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(
                lambda p: net.started.append(dist.all_reduce(p.grad, async_op=True))
            )
    return net
"""
    later = draw.random() < 0.5
    after = "    for work in model.started:\n        work.wait()\n" if later else ""
    step = STEP.format(backward="value.backward()", after=after)
    return assemble(
        "sums in hooks", choice, COPY.format(rest=started if later else rest), step, draw=draw
    )


def ddp(draw: Random, choice: dict) -> str:
    """torch's DDP, whose mean the loss makes up for."""
    options = ["find_unused_parameters=True"]
    options += draw.choice(([], ["gradient_as_bucket_view=True"], ["broadcast_buffers=False"]))
    model = COPY.format(rest=f"    return DistributedDataParallel(net, {', '.join(options)})\n")
    step = STEP.format(backward="(value * WORLD).backward()", after="")
    imports = "from torch.nn.parallel import DistributedDataParallel\n"
    return assemble("DDP", choice, model, step, imports=imports, draw=draw)


def ddp_accumulate(draw: Random, choice: dict) -> str:
    """DDP with micro-batches under no_sync."""
    rest = "    return DistributedDataParallel(net, find_unused_parameters=True)\n"
    step = """def step(model, mine):
#LOOK
    total = torch.zeros(())
    parts = list(zip(*(v.tensor_split(2) for v in mine)))
    for i, (x, t) in enumerate(parts):
        with nullcontext() if i == len(parts) - 1 else model.no_sync():
            value = loss(model(x), t) * count(t) / TOTAL
            (value * WORLD).backward()
        total += value.detach()
#WATCH
    dist.all_reduce(total)
    return total
"""
    imports = "from torch.nn.parallel import DistributedDataParallel\n"
    text = assemble("DDP, gradients accumulate", choice, COPY.format(rest=rest), step,
                    imports=imports, draw=draw)  # fmt: skip
    return text.replace("import torch\n", "from contextlib import nullcontext\n\nimport torch\n", 1)


FSDP = """    mesh = init_device_mesh("cpu", {shape})
    for name in {layers}:
        fully_shard(getattr(net, name), mesh=mesh, reshard_after_forward={reshard})
    fully_shard(net, mesh=mesh)
{factor}    return net
"""
FSDP_IMPORTS = (
    "from torch.distributed.device_mesh import init_device_mesh\n"
    "from torch.distributed.fsdp import fully_shard\n"
)


def fsdp_model(draw, choice, shape, factor):
    layers = draw.choice(([], choice["model"]["layers"]))
    rest = FSDP.format(shape=shape, layers=layers, reshard=draw.random() < 0.5, factor=factor)
    return COPY.format(rest=rest)


def fsdp(draw: Random, choice: dict) -> str:
    """FSDP2; its mean is switched off, or made up for."""
    off = draw.random() < 0.5
    factor = "    net.set_gradient_divide_factor(1.0)\n" if off else ""
    backward = "value.backward()" if off else "(value * WORLD).backward()"
    model = fsdp_model(draw, choice, "(WORLD,)", factor)
    step = STEP.format(backward=backward, after="")
    return assemble("FSDP2", choice, model, step, imports=FSDP_IMPORTS, draw=draw)


def fsdp_accumulate(draw: Random, choice: dict) -> str:
    """FSDP2 with micro-batches, of which the last one reduces; on 4 ranks with copies of shards."""
    shape = '(2, 2), mesh_dim_names=("copies", "shards")' if choice["world"] == 4 else "(WORLD,)"
    step = """def step(model, mine):
#LOOK
    total = torch.zeros(())
    parts = list(zip(*(v.tensor_split(2) for v in mine)))
    for i, (x, t) in enumerate(parts):
        model.set_requires_gradient_sync(i == len(parts) - 1)
        value = loss(model(x), t) * count(t) / TOTAL
        (value * WORLD).backward()
        total += value.detach()
#WATCH
    dist.all_reduce(total)
    return total
"""
    model = fsdp_model(draw, choice, shape, "")
    return assemble("FSDP2, gradients accumulate", choice, model, step,
                    imports=FSDP_IMPORTS, draw=draw)  # fmt: skip


def zero(draw: Random, choice: dict) -> str:
    """Each rank owns a part of the flat gradient: a reduce-scatter, then an all-gather."""
    after = """    held = [p for p in model.parameters() if p.grad is not None]
    flat = torch.cat([p.grad.flatten() for p in held])
    size = -(-len(flat) // WORLD)
    padded = F.pad(flat, (0, size * WORLD - len(flat)))
    own = torch.empty(size)
    dist.reduce_scatter_tensor(own, padded)
    dist.all_gather_into_tensor(padded, own)
    for p, part in zip(held, padded[: len(flat)].split([p.numel() for p in held])):
        p.grad = part.view_as(p).clone()
"""
    step = STEP.format(backward="value.backward()", after=after)
    model = COPY.format(rest="    return net\n")
    return assemble("gradients in parts", choice, model, step, draw=draw)


def dtensor(draw: Random, choice: dict) -> str:
    """All in DTensors: replicated parameters, a cut batch, a sum as loss."""
    rest = """    net.mesh = init_device_mesh("cpu", (WORLD,))
    return distribute_module(net, net.mesh)
"""
    step = """def step(model, mine):
    x, t = (distribute_tensor(v, model.mesh, [Shard(0)]) for v in mine)
    value = ((model(x) - t) ** 2).sum() / t.numel()
    value = value.redistribute(placements=[Replicate()])
    value.backward()
    return value.detach().to_local()
"""
    imports = """from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
"""
    n, i, o = 8, draw.choice((3, 4)), draw.choice((2, 3))
    net = f"""class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.norm = nn.Linear({i}, 6), nn.LayerNorm(6)
        self.out = nn.Linear(6, {o}, bias={draw.random() < 0.5})

    def forward(self, x):
        return self.out(F.gelu(self.norm(self.inp(x))))
"""
    text = f"""def batch():
    g = torch.Generator().manual_seed({draw.randrange(1000)})
    return torch.randn({n}, {i}, generator=g), torch.randn({n}, {o}, generator=g)
"""
    choice = {**choice, "model": {"net": net, "batch": text, "loss": SQUARES}}
    text = assemble("DTensors", choice, COPY.format(rest=rest), step, imports=imports, draw=draw)
    start = text.index("def mine("), text.index("loss = ")
    return text[: start[0]] + text[start[1] :]


def linop_data(draw: Random, choice: dict) -> str:
    """linop's DataParallel."""
    options = draw.choice(("", ', algorithm="ring"', ", bucket_cap_mb=0.0001", ", check_every=1"))
    rest = f"""    axis = Mesh(linop.backends.get("torch"), dp=-1)["dp"]
    return DataParallel(net, axis{options})
"""
    step = STEP.format(backward="value.backward()", after="")
    imports = "\nimport linop\nfrom linop.strategies import DataParallel, Mesh\n"
    return assemble("linop", choice, COPY.format(rest=rest), step, imports=imports, draw=draw)


def linop_shards(draw: Random, choice: dict) -> str:
    """linop's fully_shard: rows of all parameters."""
    options = draw.choice(("", ", reshard_after_forward=False"))
    rest = f"""    axis = Mesh(linop.backends.get("torch"), dp=-1)["dp"]
    return fully_shard(net, axis{options})


def shard(name, value, rank, world):
    return value if name in {choice["model"]["buffers"]} else value.tensor_split(world)[rank]
"""
    step = STEP.format(backward="value.backward()", after="")
    imports = "\nimport linop\nfrom linop.strategies import Mesh, fully_shard\n"
    return assemble(
        "shards of linop", choice, COPY.format(rest=rest), step, imports=imports, draw=draw
    )


STRATEGIES = [by_hand, hooks, ddp, ddp_accumulate, fsdp, fsdp_accumulate, zero, dtensor, linop_data,
              linop_shards]  # fmt: skip
FITS: dict[str, set[str]] = {}
QUIET = {"dtensor"}
