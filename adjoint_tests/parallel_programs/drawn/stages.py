"""Strategies of right programs: pipelines, vocabularies in parts, statistics of all, bfloat16."""

from random import Random

from drawn.text import ACTIVATIONS, IMPORTS, file, twin


def sent(draw: Random, choice: dict) -> str:
    """A pipeline by send and receive, with micro-batches and a tied table at both ends."""
    v, w, micro = draw.choice((6, 8)), draw.choice((3, 4)), draw.choice((1, 2, 3))
    tied = draw.random() < 0.6
    head = "h @ self.table.weight.T" if tied else "self.head(h)"
    own = "" if tied else f"\n            self.head = nn.Linear({w}, {v})"
    table = "" if tied else "if 0 in stages:\n            "
    text = f"""

class Net(nn.Module):
    def __init__(self, stages=(0, 1)):
        super().__init__()
        {table}self.table = nn.Embedding({v}, {w})
        if 0 in stages:
            self.first = nn.Linear({w}, {w})
        if 1 in stages:
            self.second = nn.Linear({w}, {w}){own}

    def bottom(self, ids):
        return {draw.choice(ACTIVATIONS)}(self.first(self.table(ids)))

    def top(self, h):
        h = h + {draw.choice(ACTIVATIONS)}(self.second(h))
        return {head}

    def forward(self, ids):
        return self.top(self.bottom(ids))
"""
    rest = f"""

def model(twin):
    net = Net(stages=(dist.get_rank(),))
    net.load_state_dict({{k: v for k, v in twin.state_dict().items() if k in net.state_dict()}})
    return net


def batch():
    g = torch.Generator().manual_seed({draw.randrange(99)})
    return torch.randint(0, {v}, (2, 7), generator=g).unbind()


loss = F.cross_entropy


def step(model, mine):
    total, kept = torch.zeros(()), []
    parts = list(zip(*(v.tensor_split({micro}) for v in mine)))
    for ids, target in parts:  # all forward passes, then all backward passes
        if dist.get_rank() == 0:
            kept.append(model.bottom(ids))
            dist.send(kept[-1].detach(), dst=1)
        else:
            dist.recv(h := torch.empty(len(ids), {w}), src=0)
            value = loss(model.top(h.requires_grad_()), target) * len(ids) / len(mine[0])
            total += value.detach()
            kept.append((h, value))
    for i in range(len(parts)):
        if dist.get_rank() == 0:
            dist.recv(grad := torch.empty_like(kept[i]), src=1)
            kept[i].backward(grad)
        else:
            h, value = kept[i]
            value.backward()
            dist.send(h.grad, dst=0)
{"    dist.all_reduce(model.table.weight.grad)" if tied else ""}
    dist.broadcast(total, src=1)
    return total
"""
    parts = [IMPORTS, text, twin(choice["seed"]), rest]
    return file("A pipeline of two stages, by hand.", 2, parts)


STAGED = '''

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList({count} * [None])
        for i in range({count}):
            self.parts[i] = nn.Sequential(nn.Linear({w}, {w}), nn.{act}(), nn.LayerNorm({w}))

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return x


class Stage(nn.Module):
    """One part; parameters keep the names of the whole net."""

    def __init__(self, net, number):
        super().__init__()
        self.number = number
        self.parts = nn.ModuleDict({{str(number): net.parts[number]}})

    def forward(self, x):
        return self.parts[str(self.number)](x)
'''
STAGE_BATCH = """

def batch():
    g = torch.Generator().manual_seed({seed})
    return torch.randn(8, {w}, generator=g), torch.randn(8, {w}, generator=g)


loss = F.mse_loss
"""


def torch_pipeline(draw: Random, choice: dict) -> str:
    """torch.distributed.pipelining, its schedule dividing or the loss."""
    world, w = choice["world"], draw.choice((3, 4))
    scale, kind = draw.random() < 0.5, draw.choice(("ScheduleGPipe", "Schedule1F1B"))
    value = "loss(output, target)" if scale else "loss(output, target) / MICRO"
    rest = f"""

def model(twin):
    net = Net()
    net.load_state_dict(twin.state_dict())
    return Stage(net, dist.get_rank())


MICRO = 4


def share(output, target):
    return {value}


def step(model, mine):
    stage = PipelineStage(model, dist.get_rank(), WORLD, torch.device("cpu"))
    schedule = {kind}(stage, MICRO, loss_fn=share, scale_grads={scale})
    x, t = mine
    losses = []
    if dist.get_rank() == 0:
        schedule.step(x)
    elif dist.get_rank() == WORLD - 1:
        schedule.step(target=t, losses=losses)
    else:
        schedule.step()
    total = sum((v.detach() for v in losses), torch.zeros(())){" / MICRO" if scale else ""}
    dist.broadcast(total, src=WORLD - 1)
    return total
"""
    imports = IMPORTS + f"from torch.distributed.pipelining import PipelineStage, {kind}\n"
    net = STAGED.format(count=world, w=w, act=draw.choice(("Tanh", "GELU", "SiLU")))
    end = STAGE_BATCH.format(seed=draw.randrange(99), w=w)
    parts = [imports, net, twin(choice["seed"]), end, rest]
    return file("A pipeline of torch.", world, parts)


def linop_pipeline(draw: Random, choice: dict) -> str:
    """linop's Pipeline, by a schedule that is data."""
    world, w = choice["world"], draw.choice((3, 4))
    kind = draw.choice(("gpipe", "one_forward_one_backward"))
    layers = f"nn.Linear({w}, {w}), nn.Tanh()"
    rest = f'''

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(*(layer for _ in range(WORLD) for layer in ({layers})))


class Stage(nn.Module):
    """This worker's part of the net, under the net's names, and the pipeline."""

    def __init__(self, stage, pipe):
        super().__init__()
        for name, layer in stage.named_children():
            self.add_module(name, layer)
        self.pipe = pipe


def model(twin):
    net = Net()
    net.load_state_dict(twin.state_dict())
    stages = split(net, [str(2 * i) for i in range(1, WORLD)])
    table = schedules.{kind}(stages=WORLD, micro_batches=4)
    backend = linop.backends.get("torch")
    pipe = Pipeline(stages, table, nn.MSELoss(), reduction="mean", backend=backend)
    return Stage(stages[dist.get_rank()], pipe)


def step(model, mine):
    value = model.pipe.step(*mine)
    total = torch.zeros(()) if value is None else value.detach().clone()
    dist.all_reduce(total)
    return total
'''
    imports = IMPORTS + "\nimport linop\nfrom linop import schedules\n"
    imports += "from linop.strategies import Pipeline, split\n"
    end = STAGE_BATCH.format(seed=draw.randrange(99), w=w)
    parts = [imports, rest, twin(choice["seed"]), end]
    return file("A pipeline of linop.", world, parts)


def vocabulary(draw: Random, choice: dict) -> str:
    """Embedding, tied head and cross entropy with the vocabulary in parts."""
    world, w = choice["world"], draw.choice((3, 4))
    v = 4 * world
    text = f"""

class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        dist.all_reduce(x := x.clone())
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        dist.all_reduce(grad := grad.clone())
        return grad


class Net(nn.Module):
    def __init__(self, rows={v}):
        super().__init__()
        self.words = nn.Parameter(torch.randn(rows, {w}))
        self.mix = nn.Linear({w}, {w})

    def look_up(self, ids):
        return self.words[ids]

    def enter(self, h):
        return h

    def forward(self, ids):
        h = {draw.choice(ACTIVATIONS)}(self.mix(self.look_up(ids)))
        return self.enter(h) @ self.words.T


class Cut(Net):
    def own(self, ids):
        local = ids - dist.get_rank() * len(self.words)
        inside = (local >= 0) & (local < len(self.words))
        return local.clamp(0, len(self.words) - 1), inside

    def look_up(self, ids):
        local, inside = self.own(ids)
        return Sum.apply(self.words[local] * inside[..., None])

    def enter(self, h):
        return Copy.apply(h)


def shard(name, value, rank, world):
    return value.chunk(world)[rank] if name == "words" else value


def model(twin):
    net = Cut({v} // WORLD)
    state = {{k: shard(k, v, dist.get_rank(), WORLD) for k, v in twin.state_dict().items()}}
    net.load_state_dict(state)
    return net


def batch():
    g = torch.Generator().manual_seed({draw.randrange(99)})
    return torch.randint(0, {v}, (2, 6), generator=g).unbind()


loss = F.cross_entropy


def step(model, mine):
    ids, target = mine
    logits = model(ids)
    dist.all_reduce(top := logits.detach().amax(1), op=dist.ReduceOp.MAX)
    total = Sum.apply((logits - top[:, None]).exp().sum(1))
    local, inside = model.own(target)
    picked = Sum.apply(logits.gather(1, local[:, None])[:, 0] * inside)
    value = (total.log() + top - picked).mean()
    value.backward()
    return value.detach()
"""
    return file("A vocabulary in parts.", world, [IMPORTS, text, twin(choice["seed"])])


def statistics(draw: Random, choice: dict) -> str:
    """Batch norm with the statistics of all ranks' samples, unequal numbers of them."""
    world, momentum = choice["world"], draw.choice((0.1, 0.3))
    n = draw.choice((9, 10, 13))
    text = f"""from torch.nn.parallel import DistributedDataParallel


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        dist.all_reduce(x := x.clone())
        return x

    @staticmethod
    def backward(ctx, grad):
        dist.all_reduce(grad := grad.clone())
        return grad


class Shared(nn.BatchNorm2d):
    def forward(self, x):
        count = torch.tensor(float(x[:, 0].numel()))
        dist.all_reduce(count)
        mean = Sum.apply(x.sum((0, 2, 3))) / count
        d = x - mean[:, None, None]
        var = Sum.apply(d.square().sum((0, 2, 3))) / count
        with torch.no_grad():
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var * count / (count - 1), self.momentum)
        d = d * (var + self.eps).rsqrt()[:, None, None]
        return d * self.weight[:, None, None] + self.bias[:, None, None]


class Net(nn.Module):
    def __init__(self, norm=nn.BatchNorm2d):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, bias=False)
        self.norm = norm(4, momentum={momentum})
        self.out = nn.Linear(4, 3)

    def forward(self, x):
        return self.out({draw.choice(ACTIVATIONS)}(self.norm(self.conv(x))).mean((2, 3)))
"""
    rest = f"""

def model(twin):
    net = Net(Shared)
    net.load_state_dict(twin.state_dict())
    return DistributedDataParallel(net, broadcast_buffers={draw.random() < 0.5})


def batch():
    g = torch.Generator().manual_seed({draw.randrange(99)})
    return torch.randn({n}, 2, 5, 5, generator=g), torch.randint(0, 3, ({n},), generator=g)


def mine(batch, rank, world):
    return tuple(v.tensor_split(world)[rank] for v in batch)


loss = F.cross_entropy


def step(model, mine):
    value = loss(model(mine[0]), mine[1]) * len(mine[1]) / {n}
    (value * WORLD).backward()
#WATCH
    dist.all_reduce(total := value.detach().clone())
    return total
"""
    imports, text = IMPORTS + text.split("\n", 1)[0] + "\n", text.split("\n", 1)[1]
    return file("Statistics of all samples.", world, [imports, text, twin(choice["seed"]), rest])


def half(draw: Random, choice: dict) -> str:
    """bfloat16 by autocast on whole numbers, whose sums are exact in it."""
    world, i, o = choice["world"], draw.choice((3, 4)), draw.choice((2, 4))
    text = f"""from torch.nn.parallel import DistributedDataParallel


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.out = nn.Linear({i}, 4), nn.Linear(4, {o})
        for p in self.parameters():
            p.data = torch.randint(-1, 2, p.shape).to(p.dtype)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16, enabled=x.dtype == torch.float32):
            return self.out(torch.relu(self.inp(x))).to(x.dtype)


def model(twin):
    net = Net()
    net.load_state_dict(twin.state_dict())
    return DistributedDataParallel(net)


def batch():
    g = torch.Generator().manual_seed({draw.randrange(99)})
    x, t = torch.randint(-2, 3, (8, {i}), generator=g), torch.randint(-2, 3, (8, {o}), generator=g)
    return x.to(torch.get_default_dtype()), t.to(torch.get_default_dtype())


def mine(batch, rank, world):
    return tuple(v.chunk(world)[rank] for v in batch)


def loss(output, target):
    return (output - target).square().sum() / 2


def step(model, mine):
    value = loss(model(mine[0]), mine[1])
    (value * WORLD).backward()
#WATCH
    dist.all_reduce(total := value.detach().clone())
    return total
"""
    imports, text = IMPORTS + text.split("\n", 1)[0] + "\n", text.split("\n", 1)[1]
    parts = [imports.replace("import torch.nn.functional as F\n", ""), text, twin(choice["seed"])]
    return file("Mixed precision on whole numbers.", world, parts, dtype="float32")


STRATEGIES = [sent, torch_pipeline, linop_pipeline, vocabulary, statistics, half]
