"""Train with the loop of Hugging Face's accelerate, data parallel by linop.

    python examples/with_accelerate.py               # two threads
    mpiexec -n 2 python examples/with_accelerate.py

accelerate takes each worker for a process of its own: it moves tensors, scales losses and counts
micro-batches, and sums nothing. The gradients of `DataParallel` are sums before it clips them.
"""

import os

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import TensorDataset

import linop
from linop.strategies import DataParallel, loader


def main(backend: object) -> float:
    """The sum of the trained parameters' sizes; the same for any number of workers."""
    del backend
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "WORLD_SIZE"):
        os.environ.pop(name, None)  # or accelerate starts torch.distributed beside linop
    accelerator = Accelerator(cpu=True)
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(*(torch.randn(27, n, generator=generator) for n in (8, 2)))
    linear = nn.Linear(8, 2)
    with torch.no_grad():
        for p in linear.parameters():
            p.copy_(torch.linspace(-1, 1, p.numel()).view(p.shape))
    net = DataParallel(linear)
    net, adam, batches = accelerator.prepare(
        net, torch.optim.Adam(net.parameters(), lr=0.1), loader(data, net.axis, batch_size=8)
    )
    for _ in range(2):
        for x, t in batches:
            loss = nn.functional.mse_loss(net(x), t) * net.share(len(x))
            adam.zero_grad()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(net.parameters(), 1.0)
            adam.step()
    return float(sum(p.detach().abs().sum() for p in net.parameters()))


if __name__ == "__main__":
    print(linop.launch(main, None if "OMPI_COMM_WORLD_SIZE" in os.environ else 2))
