"""A case: a model, its configuration, a strategy, workers and a seed; and what all who run it begin
with. Data that print, travel to ranks, and say all that is drawn."""

from __future__ import annotations

import copy
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from support.models.model import IGNORED, Batch, Configuration, Family, entropy, made
from support.models.zoo import ZOO


@dataclass(frozen=True)
class Case:
    """One cell of the table, or one draw.

    Attributes:
        model: its name in `ZOO`.
        configuration: of the model.
        strategy: its name in `support.models.strategies`.
        mesh: extents of the axes that the strategy takes, by name.
        seed: of values and of batches.
        trains: mode of the model.
        rows: of the batch, for each worker of the data axis and micro-batch.
        micro: the number of micro-batches of a pipeline.
        steps: of the optimizer.
        decay: weight decay, by which a gradient of zero differs from none.
        mean: a loss whose mean is that of torch's own function, for pipelines.
        options: "point", the cut of a pipeline; "cuts", "attention" or "others" of a plan alone;
            "seeded", random numbers are comparable; "read", parameters are read beside a forward;
            "methods", timm's forward in two methods.
    """

    model: str
    configuration: Configuration
    strategy: str
    mesh: Mapping[str, int]
    seed: int = 0
    trains: bool = True
    rows: int = 2
    micro: int = 2
    steps: int = 2
    decay: float = 0.1
    mean: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def family(self) -> Family:
        return ZOO[self.model]

    @property
    def workers(self) -> int:
        n = 1
        for extent in self.mesh.values():
            n *= extent
        return n

    @property
    def replicas(self) -> int:
        """Workers that have different rows."""
        return self.mesh.get("dp", 1)

    @property
    def micro_batches(self) -> int:
        """A list for each of them."""
        return self.micro if "pp" in self.mesh else 1

    def point(self, names: Container[str]) -> str:
        """The start of the second stage, of a model with these submodules."""
        name: str = self.options.get("point", self.family.cuts[0])
        return name if name in names else name.partition(".")[2]

    def cuts(self, name: str) -> bool:
        """A cut of tensor parallelism is taken: of the attention, of the others, or all."""
        attention = any(part in name.lower() for part in ("attn", "attention"))
        return {"attention": attention, "others": not attention}.get(
            self.options.get("cuts", ""), True
        )

    @property
    def drops(self) -> bool:
        """Random numbers are drawn in forward."""
        c = self.configuration
        return self.trains and bool(c.get("dropout") or c.get("path"))

    def __str__(self) -> str:
        said = {k: v for k, v in vars(self).items() if k not in ("model", "strategy", "mesh")}
        mesh = " x ".join(f"{name}={n}" for name, n in self.mesh.items())
        return f"{self.model} | {self.strategy} | {mesh} | {said}"


_KEPT: dict[str, Any] = {}


def start(case: Case) -> Any:
    """A copy of the model of a case before the first step. Threads share what torch draws from, so
    it is built once, before they start."""
    key = repr((case.model, sorted(case.configuration.items()), case.seed))
    if key not in _KEPT:
        _KEPT.clear()
        _KEPT[key] = made(case.family, case.configuration, case.seed)
    return copy.deepcopy(_KEPT[key]).train(case.trains)


def batch(case: Case, step: int) -> Batch:
    """The whole batch of a step."""
    draw = torch.Generator().manual_seed(1000 * case.seed + step)
    rows = case.rows * case.replicas * case.micro_batches
    return case.family.inputs(case.configuration, rows, draw)


def part(case: Case, step: int, replica: int) -> Batch:
    """The rows of one worker of the data axis."""
    rows = case.rows * case.micro_batches
    return batch(case, step).rows(replica * rows, (replica + 1) * rows)


def weight(case: Case, step: int) -> float:
    """One over the number of targets that count in the whole batch."""
    return 1.0 / max(1, int((batch(case, step).target != IGNORED).sum()))


def loss(case: Case, step: int, output: Any, target: Any) -> Any:
    """A worker's term of the mean over the whole batch."""
    return entropy(output, target) * weight(case, step)


def optimizer(case: Case, parameters: Any) -> Any:
    """Elementwise, so that blocks have their own; linear in the gradients, so that a wrong factor
    is seen."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=case.decay)


def seeded(case: Case, step: int, replica: int) -> None:
    """Begin the random numbers of a forward."""
    torch.manual_seed(100_000 * (case.seed + 1) + 100 * step + replica)
