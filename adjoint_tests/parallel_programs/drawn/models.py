"""Models of right programs, with their batches and losses.

Each function draws one, and returns the parts of a file: `net` (the class Net), `batch` (its
function), `loss` (functions loss and count: a mean, and of how many things), `layers` (names of
submodules that may be sharded on their own)."""

from random import Random

ACTIVATIONS = ("torch.tanh", "F.gelu", "F.silu", "torch.sigmoid", "F.elu")
SQUARES = """loss = F.mse_loss


def count(target):
    return target.numel()
"""
CLASSES = """loss = F.cross_entropy


def count(target):
    return len(target)
"""
LABELS = """def loss(logits, target):
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-100)


def count(target):
    return int((target != -100).sum())
"""


def batch(x, t, seed):
    return f"""def batch():
    g = torch.Generator().manual_seed({seed})
    return {x}, {t}
"""


def rows(draw):
    return draw.choice((8, 8, 10, 11, 13))


def mlp(draw: Random) -> dict[str, object]:
    """A perceptron, with a choice of what models have beside weights in use."""
    i, h, o = draw.choice((3, 4)), draw.choice((4, 6)), draw.choice((2, 3))
    extra, use = draw.choice(
        [
            ("", ""),
            ("        self.spare = nn.Linear(3, 2)  # for another task\n", ""),
            ("        self.inp.weight.requires_grad_(False)\n", ""),
            (
                f'        self.register_buffer("scale", torch.linspace(0.5, 2, {h}))\n',
                "        h = h * self.scale\n",
            ),
            (
                '        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))\n',
                "        self.steps += 1\n",
            ),
            (
                "        g = torch.Generator().manual_seed(5)\n"
                f"        keep = torch.rand({h}, generator=g) > 0.3\n"
                '        self.register_buffer("keep", keep / 0.7)  # the same features for all\n',
                "        h = h * self.keep\n",
            ),
        ]
    )
    n, classes = rows(draw), draw.random() < 0.5
    target = (
        f"torch.randint(0, {o}, ({n},), generator=g)"
        if classes
        else f"torch.randn({n}, {o}, generator=g)"
    )
    net = f"""class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear({i}, {h}, bias={draw.random() < 0.7})
        self.norm = {draw.choice((f"nn.LayerNorm({h})", f"nn.RMSNorm({h})", "nn.Identity()"))}
        self.out = nn.Linear({h}, {o})
{extra}
    def forward(self, x):
        h = self.norm({draw.choice(ACTIVATIONS)}(self.inp(x)))
{use}        return self.out(h)
"""
    return {
        "net": net,
        "batch": batch(f"torch.randn({n}, {i}, generator=g)", target, draw.randrange(1000)),
        "loss": CLASSES if classes else SQUARES,
        "layers": ["inp", "out"],
        "buffers": ["scale", "steps", "keep"],
    }


def conv(draw: Random) -> dict[str, object]:
    """A convolutional classifier."""
    c, o, n = draw.choice((2, 3)), draw.choice((2, 3)), rows(draw)
    net = f"""class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d({c}, 4, 3, padding=1)
        self.conv2 = nn.Conv2d(4, 4, 3, stride=2, groups={draw.choice((1, 2))})
        self.norm = nn.GroupNorm(2, 4)
        self.out = nn.Linear(4, {o})

    def forward(self, x):
        h = {draw.choice(ACTIVATIONS)}(self.conv1(x))
        h = F.max_pool2d(F.relu(self.norm(self.conv2(h))), 2)
        return self.out(h.mean((2, 3)))
"""
    x = f"torch.randn({n}, {c}, 6, 6, generator=g)"
    t = f"torch.randint(0, {o}, ({n},), generator=g)"
    return {
        "net": net,
        "batch": batch(x, t, draw.randrange(1000)),
        "loss": CLASSES,
        "layers": ["conv1", "conv2"],
        "buffers": [],
    }


def transformer(draw: Random) -> dict[str, object]:
    """A transformer block on sequences; the gradient of its keys' bias is zero."""
    w, n = draw.choice((4, 8)), rows(draw)
    net = f"""class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm({w}), nn.LayerNorm({w})
        self.attention = nn.MultiheadAttention({w}, 2, batch_first=True)
        self.up, self.down = nn.Linear({w}, {2 * w}), nn.Linear({2 * w}, {w})

    def forward(self, x):
        h = self.norm1(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.down({draw.choice(ACTIVATIONS)}(self.up(self.norm2(x))))
"""
    x = f"torch.randn({n}, 5, {w}, generator=g)"
    return {
        "net": net,
        "batch": batch(x, x, draw.randrange(1000)),
        "loss": SQUARES,
        "layers": ["up", "down"],
        "buffers": [],
    }


def language(draw: Random) -> dict[str, object]:
    """A language model whose head is its embedding; sequences of unequal lengths."""
    v, w, n = draw.choice((7, 9)), draw.choice((4, 6)), draw.choice((8, 10))
    lengths = tuple(draw.randint(1, 5) for _ in range(n))
    net = f"""class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding({v}, {w})
        self.mix = nn.Linear({w}, {w})
        self.head = nn.Linear({w}, {v}, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids):
        h = self.words(ids)
        return self.head(h + {draw.choice(ACTIVATIONS)}(self.mix(h.cumsum(1))))
"""
    text = f"""def batch():
    g = torch.Generator().manual_seed({draw.randrange(1000)})
    ids = torch.randint(0, {v}, ({n}, 6), generator=g)
    target = ids[:, 1:].clone()
    for row, length in enumerate({lengths}):
        target[row, length:] = -100
    return ids[:, :-1], target
"""
    return {"net": net, "batch": text, "loss": LABELS, "layers": ["mix"], "buffers": []}


def recurrent(draw: Random) -> dict[str, object]:
    """A recurrent regressor."""
    i, h, n = draw.choice((2, 3)), draw.choice((3, 4)), rows(draw)
    kind = draw.choice(("LSTM", "GRU"))
    net = f"""class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells = nn.{kind}({i}, {h}, batch_first=True)
        self.out = nn.Linear({h}, 2)

    def forward(self, x):
        return self.out(self.cells(x)[0][:, -1])
"""
    x, t = f"torch.randn({n}, 4, {i}, generator=g)", f"torch.randn({n}, 2, generator=g)"
    return {
        "net": net,
        "batch": batch(x, t, draw.randrange(1000)),
        "loss": SQUARES,
        "layers": ["out"],
        "buffers": [],
    }


MODELS = [mlp, mlp, conv, transformer, language, recurrent]
