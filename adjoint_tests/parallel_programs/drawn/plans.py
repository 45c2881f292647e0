"""Strategies of right programs that cut the model by a plan, of torch or of linop."""

from random import Random

from drawn.text import ACTIVATIONS, IMPORTS, REPLICATED_STEP, batch, dropped, file, twin

TORCH_TP = """from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
"""
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
        self.words = nn.Embedding(8, {w})
        self.norm = nn.LayerNorm({w})
        self.up, self.down = nn.Linear({w}, {2 * w}), nn.Linear({2 * w}, {w})
        self.last = nn.LayerNorm({w})
        self.head = nn.Linear({w}, 8)

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
    ids = torch.randint(0, 8, (3, 9), generator=g)
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
    for name in NAMES:
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
""".replace("NAMES", draw.choice(("()", '("up", "down")', '("inp", "out")')))
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


STRATEGIES = [torch_plan, torch_sequence, torch_grid, linop_plan, linop_grid]
