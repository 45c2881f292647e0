"""Strategies of right programs that cut the model: each has models of its own, of drawn sizes."""

from random import Random

IMPORTS = """import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
"""
PAIR = '''

class Spread(torch.autograd.Function):
    """Megatron's f, within a group."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        dist.all_reduce(grad := grad.clone(), group=ctx.group)
        return grad, None


class Collect(torch.autograd.Function):
    """Megatron's g."""

    @staticmethod
    def forward(ctx, x, group):
        dist.all_reduce(x := x.clone(), group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None
'''
SEQUENCE = """

def whole(x):
    out = x.new_empty(WORLD * len(x), *x.shape[1:])
    dist.all_gather_into_tensor(out, x.contiguous())
    return out


def own(x):
    dist.all_reduce(x := x.clone())
    return x.chunk(WORLD)[dist.get_rank()].contiguous()


class Gather(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: whole(x))
    backward = staticmethod(lambda ctx, grad: own(grad))


class Scatter(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: own(x))
    backward = staticmethod(lambda ctx, grad: whole(grad))
"""
ACTIVATIONS = ("torch.tanh", "F.gelu", "F.silu", "torch.relu")
TORCH_TP = """from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
"""
REPLICATED_STEP = """

def step(model, mine):
#LOOK
    value = loss(model(mine[0]), mine[1])
    value.backward()
#WATCH
    return value.detach()
"""


def file(what, world, parts):
    head = f'"""{what}"""\n\n{parts[0]}\ntorch.set_default_dtype(torch.float64)\nWORLD = {world}\n'
    return head + "".join(parts[1:])


def twin(seed):
    return f"\n\ndef twin():\n    torch.manual_seed({seed})\n    return Net()\n"


def batch(seed, shape, target=None):
    target = target or f"torch.randn({shape}, generator=g)"
    return f"""

def batch():
    g = torch.Generator().manual_seed({seed})
    return torch.randn({shape}, generator=g), {target}


loss = F.mse_loss
"""


def dropped(draw):
    """A dropout of a replicated tensor: every rank draws the same numbers."""
    p = draw.choice((0.0, 0.25, 0.4))
    if not p:
        return ""
    seed = draw.randrange(100)
    return f"\n        torch.manual_seed({seed})\n        h = F.dropout(h, {p}, self.training)"


def mlp_net(draw, width, hidden, drop=True):
    return f"""

class Net(nn.Module):
    def __init__(self, cut=1):
        super().__init__()
        self.norm = nn.LayerNorm({width})
        self.up = nn.Linear({width}, {hidden} // cut)
        self.down = nn.Linear({hidden} // cut, {width})

    def enter(self, h):
        return h

    def leave(self, h):
        return self.down(h)

    def forward(self, x):
        h = self.norm(x){dropped(draw) if drop else ""}
        return x + self.leave({draw.choice(ACTIVATIONS)}(self.up(self.enter(h))))
"""


SHARD = """

def shard(name, value, rank, world):
    dim = {"up.weight": 0, "up.bias": 0, "down.weight": 1}.get(name)
    return value if dim is None else value.chunk(%s, dim)[%s]


def model(twin):
    net = Cut(%s)
    state = {k: shard(k, v, dist.get_rank(), WORLD) for k, v in twin.state_dict().items()}
    net.load_state_dict(state)
"""


def megatron(draw: Random, choice: dict) -> str:
    """f and g by hand."""
    world, width = choice["world"], draw.choice((4, 6))
    cut = """

class Cut(Net):
    def enter(self, h):
        return Spread.apply(h, None)

    def leave(self, h):
        return Collect.apply(h @ self.down.weight.T, None) + self.down.bias
"""
    shard = SHARD % ("world", "rank", "WORLD") + "    return net\n"
    net = mlp_net(draw, width, 2 * width)
    end = batch(draw.randrange(99), f"5, {width}") + draw.choice(("", REPLICATED_STEP))
    parts = [IMPORTS, PAIR, net, cut, twin(choice["seed"]), shard, end]
    return file("Tensor parallel MLP by hand.", world, parts)


def in_place(draw: Random, choice: dict) -> str:
    """An all-reduce in place, on a tensor that autograd follows: right, from terms to one tensor."""
    world, width = choice["world"], draw.choice((4, 6))
    cut = """

class Cut(Net):
    def enter(self, h):
        return Spread.apply(h, None)

    def leave(self, h):
        y = h @ self.down.weight.T
        dist.all_reduce(y)
        return y + self.down.bias
"""
    shard = SHARD % ("world", "rank", "WORLD") + "    return net\n"
    net = mlp_net(draw, width, 2 * width)
    parts = [IMPORTS, PAIR, net, cut, twin(choice["seed"]), shard]
    parts.append(batch(draw.randrange(99), f"5, {width}"))
    return file("Tensor parallel MLP whose outputs are summed in place.", world, parts)


def terms(draw: Random, choice: dict) -> str:
    """Every rank's loss is a share of the whole: then the functions of torch.distributed.nn fit."""
    world, width = choice["world"], draw.choice((4, 6))
    cut = """

class Cut(Net):
    def leave(self, h):
        return dist_fn.all_reduce(h @ self.down.weight.T) + self.down.bias
"""
    shard = SHARD % ("world", "rank", "WORLD") + "    return net\n"
    step = """

def step(model, mine):
#LOOK
    value = loss(model(mine[0]), mine[1]) / WORLD
    value.backward()
    for p in (*model.norm.parameters(), model.down.bias):
        dist.all_reduce(p.grad)
#WATCH
    dist.all_reduce(total := value.detach().clone())
    return total
"""
    imports = IMPORTS.replace(
        "import torch.nn", "import torch.distributed.nn.functional as dist_fn\nimport torch.nn"
    )
    net = mlp_net(draw, width, 2 * width)
    parts = [imports, net, cut, twin(choice["seed"]), shard]
    parts += [batch(draw.randrange(99), f"5, {width}"), step]
    return file("Tensor parallel MLP whose ranks share one loss.", world, parts)


def grid(draw: Random, choice: dict) -> str:
    """2 x 2 by hand: f and g along one axis, means along the other."""
    width, first = draw.choice((4, 6)), draw.random() < 0.5
    names = '("dp", "tp")' if first else '("tp", "dp")'
    at = "rank % 2" if first else "rank // 2"
    other = "rank // 2" if first else "rank % 2"
    cut = """

class Cut(Net):
    def enter(self, h):
        return Spread.apply(h, self.mesh["tp"].get_group())

    def leave(self, h):
        return Collect.apply(h @ self.down.weight.T, self.mesh["tp"].get_group()) + self.down.bias
"""
    shard = (
        SHARD % ("2", at, "2")
        + f"""    net.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names={names})
    return net


def mine(batch, rank, world):
    return tuple(v.tensor_split(2)[{other}] for v in batch)


def step(model, mine):
#LOOK
    value = loss(model(mine[0]), mine[1], reduction="sum") / batch()[1].numel()
    value.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, group=model.mesh["dp"].get_group())
#WATCH
    dist.all_reduce(total := value.detach().clone(), group=model.mesh["dp"].get_group())
    return total
"""
    )
    imports = IMPORTS + "from torch.distributed.device_mesh import init_device_mesh\n"
    net = mlp_net(draw, width, 2 * width, drop=False)
    start = batch(draw.randrange(99), f"7, {width}")
    parts = [imports, PAIR, net, cut, twin(choice["seed"]), start, shard]
    return file("Two replicas of two pieces, by hand.", 4, parts)


def sequence(draw: Random, choice: dict) -> str:
    """Sequence parallel by hand."""
    world, width = choice["world"], draw.choice((4, 8))
    net = f"""

class Net(nn.Module):
    def __init__(self, hidden={2 * width}):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm({width}), nn.RMSNorm({width})
        self.up, self.down = nn.Linear({width}, hidden), nn.Linear(hidden, {width})

    def forward(self, x):
        return self.norm2(x + self.down({draw.choice(ACTIVATIONS)}(self.up(self.norm1(x)))))
"""
    net += net.replace("class Net(nn.Module)", "class Cut(Net)").split("    def __init__")[0]
    net += """    def forward(self, x):
        h = F.silu(self.up(Gather.apply(self.norm1(x))))
        return self.norm2(x + Scatter.apply(h @ self.down.weight.T) + self.down.bias)
"""
    net = net.replace(
        "F.silu(self.up(Gather", net.split("self.down(")[1].split("(self.up")[0] + "(self.up(Gather"
    )
    shard = (
        SHARD % ("world", "rank", f"{2 * width} // WORLD")
        + """    return net


def mine(batch, rank, world):
    return tuple(v.chunk(world)[rank] for v in batch)


def step(model, mine):
#LOOK
    value = loss(model(mine[0]), mine[1]) / WORLD
    value.backward()
    for p in (*model.norm1.parameters(), *model.norm2.parameters(), model.down.bias):
        dist.all_reduce(p.grad)
#WATCH
    dist.all_reduce(total := value.detach().clone())
    return total
"""
    )
    parts = [IMPORTS, SEQUENCE, net, twin(choice["seed"]), batch(draw.randrange(99), f"8, {width}")]
    return file("Sequence parallel MLP by hand.", world, [*parts, shard])


PLAIN = """

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear({i}, {w})
        self.norm = nn.{norm}({w})
        self.up, self.down = nn.Linear({w}, {h}), nn.Linear({h}, {w}, bias={bias})
        self.out = nn.Linear({w}, 3)

    def forward(self, x):
        h = self.norm(self.inp(x)){dropped}
        h = h + self.down({act}(self.up(h)))
        return self.out(h)
"""


def plain(draw, drop=True):
    norm = draw.choice(("LayerNorm", "RMSNorm"))
    w = draw.choice((4, 8))
    values = {"i": draw.choice((3, 5)), "w": w, "h": 2 * w, "norm": norm}
    values |= {"bias": draw.random() < 0.7, "act": draw.choice(ACTIVATIONS)}
    return PLAIN.format(**values, dropped=dropped(draw) if drop else ""), values


def torch_plan(draw: Random, choice: dict) -> str:
    """parallelize_module of torch: column and row parallel layers, others whole."""
    net, v = plain(draw)
    plan = {"up": "ColwiseParallel()", "down": "RowwiseParallel()"}
    if draw.random() < 0.5:
        plan["out"] = "RowwiseParallel(input_layouts=Replicate())"
    text = ", ".join(f'"{k}": {style}' for k, style in plan.items())
    model = f"""

def model(twin):
    net = Net()
    net.load_state_dict(twin.state_dict())
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
    return parallelize_module(net, mesh, {{{text}}})
"""
    end = batch(draw.randrange(99), f"6, {v['i']}", "torch.randn(6, 3, generator=g)")
    parts = [IMPORTS + TORCH_TP, net, twin(choice["seed"]), model, end]
    parts.append(draw.choice(("", REPLICATED_STEP)))
    return file("Tensor parallel by a plan of torch.", choice["world"], parts)


def torch_sequence(draw: Random, choice: dict) -> str:
    """SequenceParallel norms between column and row parallel layers."""
    w = draw.choice((4, 8))
    net = f"""

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(9, {w})
        self.norm = nn.LayerNorm({w})
        self.up, self.down = nn.Linear({w}, {2 * w}), nn.Linear({2 * w}, {w})
        self.last = nn.LayerNorm({w})
        self.head = nn.Linear({w}, 9)

    def forward(self, ids):
        x = self.words(ids)
        x = x + self.down({draw.choice(ACTIVATIONS)}(self.up(self.norm(x))))
        return self.head(self.last(x))
"""
    model = """

def model(twin):
    net = Net()
    net.load_state_dict(twin.state_dict())
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
    plan = {
        "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "last": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    return parallelize_module(net, mesh, plan)


def loss(logits, target):
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())
"""
    end = f"""

def batch():
    g = torch.Generator().manual_seed({draw.randrange(99)})
    ids = torch.randint(0, 9, (3, 9), generator=g)
    return ids[:, :-1], ids[:, 1:]
"""
    parts = [IMPORTS + TORCH_TP, net, twin(choice["seed"]), model, end, REPLICATED_STEP]
    return file("Sequence parallel by a plan of torch.", choice["world"], parts)


def torch_grid(draw: Random, choice: dict) -> str:
    """FSDP2 over tensor parallel layers, on 2 x 2 ranks."""
    net, v = plain(draw, drop=False)
    model = """

def model(twin):
    net = Net()
    net.load_state_dict(twin.state_dict())
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(net, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for name in %s:
        fully_shard(getattr(net, name), mesh=mesh["dp"])
    return fully_shard(net, mesh=mesh["dp"])


def mine(batch, rank, world):
    return tuple(v.tensor_split(2)[rank // 2] for v in batch)


def step(model, mine):
#LOOK
    x, t = mine
    value = loss(model(x), t, reduction="sum") / batch()[1].numel()
    (2 * value).backward()
#WATCH
    dist.all_reduce(total := value.detach() / 2)
    return total
""" % draw.choice(("()", '("up", "down")', '("inp", "out")'))
    end = batch(draw.randrange(99), f"7, {v['i']}", "torch.randn(7, 3, generator=g)")
    imports = IMPORTS + TORCH_TP + "from torch.distributed.fsdp import fully_shard\n"
    parts = [imports, net, twin(choice["seed"]), end, model]
    return file("Shards of tensor parallel layers.", 4, parts)


LINOP = """import linop
from linop.strategies import (
    ColwiseParallel,
    DataParallel,
    Mesh,
    RowwiseParallel,
    parallelize_module,
)
"""
LINOP_SHARD = """

def shard(name, value, rank, world):
    dim = {"up.weight": 0, "up.bias": 0, "down.weight": 1}.get(name)
    return value if dim is None else value.tensor_split(%s, dim)[%s]
"""


def linop_plan(draw: Random, choice: dict) -> str:
    """parallelize_module of linop."""
    net, v = plain(draw, drop=False)
    model = (
        LINOP_SHARD % ("world", "rank")
        + """

def model(twin):
    net = Net()
    net.load_state_dict(twin.state_dict())
    tp = Mesh(linop.backends.get("torch"), tp=-1)["tp"]
    return parallelize_module(net, tp, {"up": ColwiseParallel(), "down": RowwiseParallel()})
"""
    )
    end = batch(draw.randrange(99), f"6, {v['i']}", "torch.randn(6, 3, generator=g)")
    parts = [IMPORTS + "\n" + LINOP.replace("    DataParallel,\n", ""), net, twin(choice["seed"])]
    parts += [model, end, draw.choice(("", REPLICATED_STEP))]
    return file("Tensor parallel by a plan of linop.", choice["world"], parts)


def linop_grid(draw: Random, choice: dict) -> str:
    """linop's DataParallel over its tensor parallel layers, on 2 x 2 workers."""
    net, v = plain(draw, drop=False)
    model = (
        LINOP_SHARD % ("2", "rank % 2")
        + """

def model(twin):
    net = Net()
    net.load_state_dict(twin.state_dict())
    mesh = Mesh(linop.backends.get("torch"), dp=2, tp=2)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return DataParallel(parallelize_module(net, mesh["tp"], plan), mesh["dp"])


def mine(batch, rank, world):
    return tuple(v.tensor_split(2)[rank // 2] for v in batch)


def step(model, mine):
#LOOK
    value = loss(model(mine[0]), mine[1]) * model.share(len(mine[0]))
    value.backward()
#WATCH
    return model.total(value.detach())
"""
    )
    end = batch(draw.randrange(99), f"7, {v['i']}", "torch.randn(7, 3, generator=g)")
    parts = [IMPORTS + "\n" + LINOP, net, twin(choice["seed"]), end, model]
    return file("Replicas of tensor parallel layers of linop.", 4, parts)


from drawn.stages import STRATEGIES as STAGES  # noqa: E402

STRATEGIES = [megatron, in_place, terms, grid, sequence, torch_plan, torch_sequence, torch_grid,
              linop_plan, linop_grid, *STAGES]  # fmt: skip
