"""Strategies of right programs that cut the model: each has models of its own, of drawn sizes."""

from random import Random

from drawn.plans import STRATEGIES as PLANS
from drawn.stages import STRATEGIES as STAGES
from drawn.text import ACTIVATIONS, IMPORTS, REPLICATED_STEP, batch, dropped, file, twin

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
    """An all-reduce in place, with the identity as backward: right, from terms to one tensor."""
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
    functions = "import torch.distributed.nn.functional as dist_fn\nimport torch.nn"
    imports = IMPORTS.replace("import torch.nn", functions)
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
    act = draw.choice(ACTIVATIONS)
    net = f"""

class Net(nn.Module):
    def __init__(self, hidden={2 * width}):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm({width}), nn.RMSNorm({width})
        self.up, self.down = nn.Linear({width}, hidden), nn.Linear(hidden, {width})

    def forward(self, x):
        return self.norm2(x + self.down({act}(self.up(self.norm1(x)))))


class Cut(Net):
    def forward(self, x):
        h = {act}(self.up(Gather.apply(self.norm1(x))))
        return self.norm2(x + Scatter.apply(h @ self.down.weight.T) + self.down.bias)
"""
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


STRATEGIES = [megatron, in_place, terms, grid, sequence, *PLANS, *STAGES]
