"""Train with Lightning's Trainer, data parallel by linop.

    python examples/with_lightning.py               # two threads
    mpiexec -n 2 python examples/with_lightning.py

Each worker has a Trainer of one device, which sums nothing: the module that it trains is a
`DataParallel`, whose gradients are sums before the Trainer clips them.
"""

import os
from typing import Any

import lightning
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from torch import nn
from torch.utils.data import TensorDataset

import linop
from linop.strategies import DataParallel, loader


class Regression(lightning.LightningModule):
    """A linear map that is trained on the rows of this worker."""

    def __init__(self) -> None:
        super().__init__()
        linear = nn.Linear(8, 2)
        with torch.no_grad():
            for p in linear.parameters():
                p.copy_(torch.linspace(-1, 1, p.numel()).view(p.shape))
        self.net = DataParallel(linear)

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(0)
        data = TensorDataset(*(torch.randn(27, n, generator=generator) for n in (8, 2)))
        return loader(data, self.net.axis, batch_size=8)

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        del number
        x, t = batch
        return nn.functional.mse_loss(self.net(x), t) * self.net.share(len(x))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.1)


def main(backend: object) -> float:
    """The sum of the trained parameters' sizes; the same for any number of workers."""
    del backend
    model = Regression()
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=1,
        plugins=[LightningEnvironment()],  # or it takes mpiexec's ranks for its own
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model)
    return float(sum(p.detach().abs().sum() for p in model.net.parameters()))


if __name__ == "__main__":
    print(linop.launch(main, None if "OMPI_COMM_WORLD_SIZE" in os.environ else 2))
