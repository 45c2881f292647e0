"""Descriptions of models of other packages: how one is drawn, built, fed, cut and made parallel.

`language` and `vision` have the models; `ZOO` in `zoo` has all of them by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

import torch

Configuration = dict[str, Any]
IGNORED = -100
"""Target of an element that counts for no loss, as everywhere in torch."""


@dataclass(frozen=True)
class Batch:
    """A batch: arguments of the model's forward by position and by name, and targets."""

    arguments: tuple[Any, ...]
    options: Mapping[str, Any]
    target: Any

    def rows(self, begin: int, end: int) -> Batch:
        """Some of its rows."""
        return Batch(
            tuple(x[begin:end] for x in self.arguments),
            {name: x[begin:end] for name, x in self.options.items()},
            self.target[begin:end],
        )

    def __len__(self) -> int:
        return len(self.target)


@dataclass(frozen=True)
class Cut:
    """How a submodule is made tensor parallel: in words that linop and torch both have.

    Attributes:
        how: "column" or "row" of a linear layer or of an embedding, "norm" of a split sequence,
            "heads' norm", of a tensor that is split by heads, "attention", torch's by heads,
            "numbers": the module's attribute `named` is this worker's share,
            "input" or "output": the module's input or output is moved to another layout.
        heads: of features that are cut in whole heads.
        queries: heads of the queries, of keys and values in groups.
        inputs: layout of the input: a dimension, or "copies" of what an "input" has gathered; None:
            the usual one.
        outputs: layout of the output: a dimension or "whole"; None: the usual one.
        packed: the number of equal parts of a projection, or their lengths in any unit.
        named: of an "input", its name; empty: it is the first by position.
    """

    how: str
    heads: int | None = None
    queries: int | None = None
    inputs: int | str | None = None
    outputs: int | str | None = None
    packed: int | tuple[int, ...] | None = None
    named: str = ""


Plan = dict[str, Cut]


@dataclass(frozen=True)
class Family:
    """Models of one class of one package.

    Attributes:
        package: that has the class.
        name: of the architecture.
        usual: the configuration of the table: even sizes, without dropout.
        draw: a random configuration.
        build: the model in float32, in the mode of training.
        inputs: so many rows of input, by position and by name; and targets.
        plan: of tensor parallelism; of sequence parallelism, if it is asked for. None: there is
            nothing to cut in this way.
        cuts: names of submodules with which the second stage of a pipeline may begin.
        chains: names of its `torch.nn.Sequential` whose members are called one after the other.
        layers: names of modules whose members are repeated, each of which is sharded by itself.
        normalizes: it computes in float32 inside.
    """

    package: str
    name: str
    usual: Configuration
    draw: Callable[[Random], Configuration]
    build: Callable[[Configuration], Any]
    inputs: Callable[[Configuration, int, Any], Batch]
    plan: Callable[[Configuration, bool], Plan | None]
    cuts: tuple[str, ...]
    layers: tuple[str, ...] = ()
    chains: tuple[str, ...] = ()
    normalizes: bool = False

    @property
    def title(self) -> str:
        return f"{self.package} {self.name}"

    @property
    def tolerance(self) -> float:
        """Of differences, relative to the largest element: norms and softmax of `transformers` are
        in float32, whatever the model's dtype."""
        return 2e-5 if self.normalizes else 1e-9


def made(family: Family, configuration: Configuration, seed: int, trains: bool = True) -> Any:
    """The model in float64, with values that depend on the seed alone.

    Biases and scales that begin as zeros or ones are drawn: of zeros one does not see what is
    missing. torch's generator is as before.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = family.build(configuration).double()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p) * 0.05)
    return model.train(trains)


def logits(output: Any) -> Any:
    """The first tensor that a model returns: of an output of transformers, a tuple, or itself."""
    if torch.is_tensor(output):
        return output
    for name in "logits", "prediction_logits", "last_hidden_state":
        if (found := getattr(output, name, None)) is not None:
            return found
    return (list(output.values()) if isinstance(output, Mapping) else output)[0]


def entropy(output: Any, target: Any, reduction: str = "sum") -> Any:
    """Cross-entropy of a model's output, over all elements whose target is not `IGNORED`."""
    scores = logits(output)
    return torch.nn.functional.cross_entropy(
        scores.reshape(-1, scores.shape[-1]),
        target.reshape(-1),
        reduction=reduction,
        ignore_index=IGNORED,
    )
