"""Parts of the text of drawn programs that several strategies share."""

IMPORTS = """import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
"""
ACTIVATIONS = ("torch.tanh", "F.gelu", "F.silu", "torch.relu")

REPLICATED_STEP = """

def step(model, mine):
#LOOK
    value = loss(model(mine[0]), mine[1])
    value.backward()
#WATCH
    return value.detach()
"""


def file(what, world, parts, dtype="float64"):
    head = f'"""{what}"""\n\n{parts[0]}\ntorch.set_default_dtype(torch.{dtype})\nWORLD = {world}\n'
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
