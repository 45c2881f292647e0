"""Three pipeline stages of a small U-net. The first stage's output goes to the second, and past
it to the third as a skip connection; gradients come back the same ways."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

torch.set_default_dtype(torch.float64)
WORLD = 3
WRONG = os.environ.get("CASE", "right") == "wrong"
NAMES = ("down", "middle", "up")


class Unet(nn.Module):
    def __init__(self, names=NAMES):
        super().__init__()
        if "down" in names:
            self.down = nn.Conv1d(2, 3, 3, padding=1)
        if "middle" in names:
            self.middle = nn.Conv1d(3, 3, 3, padding=1)
        if "up" in names:
            self.up = nn.Conv1d(6, 2, 1)

    def bottom(self, h):
        return F.interpolate(torch.tanh(self.middle(F.avg_pool1d(h, 2))), scale_factor=2)

    def top(self, low, skip):
        return self.up(torch.cat([low, skip], 1))

    def forward(self, x):
        skip = F.silu(self.down(x))
        return self.top(self.bottom(skip), skip)


def twin():
    torch.manual_seed(731)
    return Unet()


def model(twin):
    net = Unet(NAMES[dist.get_rank()])
    net.load_state_dict({k: v for k, v in twin.state_dict().items() if k in net.state_dict()})
    return net


def batch():
    g = torch.Generator().manual_seed(732)
    return torch.randn(2, 2, 8, generator=g), torch.randn(2, 2, 8, generator=g)


loss = F.mse_loss


def received(shape, src):
    dist.recv(x := torch.empty(shape), src=src)
    return x


def step(model, mine):
    x, t = mine
    shape, value = (2, 3, 8), torch.zeros(())
    if dist.get_rank() == 0:
        skip = F.silu(model.down(x))
        for dst in (1, 2):
            dist.send(skip.detach(), dst=dst)
        grad = received(shape, 1)
        if not WRONG:
            grad += received(shape, 2)
        skip.backward(grad)
    elif dist.get_rank() == 1:
        h = received(shape, 0).requires_grad_()
        low = model.bottom(h)
        dist.send(low.detach(), dst=2)
        low.backward(received(shape, 2))
        dist.send(h.grad, dst=0)
    else:
        skip = received(shape, 0).requires_grad_(not WRONG)
        low = received(shape, 1).requires_grad_()
        value = loss(model.top(low, skip), t)
        value.backward()
        dist.send(low.grad, dst=1)
        if not WRONG:
            dist.send(skip.grad, dst=0)
    dist.broadcast(value := value.detach().clone(), src=2)
    return value


FAULT = {
    "parameter": ["down.weight", "down.bias"],
    "kind": "other", "factor": None, "loss": "equal",
    "note": "the skip connection is received without gradient: its share never comes back to "
            "stage 0",
    "place": ["down", "requires_grad_(not WRONG)", "skip.backward(grad)"],
    "report": None,
}  # fmt: skip
