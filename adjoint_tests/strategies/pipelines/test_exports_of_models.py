"""`split` of models that keep caches, and of those that torch cannot export."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest

if any(find_spec(name) is None for name in ("torch", "transformers")):
    pytest.skip(
        "torch or transformers is not installed: pip install 'linop-algebra[models]'",
        allow_module_level=True,
    )

import torch
from torch import nn

import linop
from linop import schedules
from linop.backends import Backend
from linop.errors import ArgumentError
from linop.strategies import Pipeline, split
from support.models.exact import inputs, model


def test_caches_are_left_out() -> None:
    net = model("Llama")
    words = inputs("Llama")["input_ids"]
    net.config.use_cache = True
    try:
        first, second = split(net, ["lm_head"], words)
        assert net.config.use_cache is True
        wanted = net(words, use_cache=False).logits
    finally:
        net.config.use_cache = False
    found = second(first(words))
    found = found[0] if isinstance(found, tuple) else found
    assert (found - wanted).abs().max() < 1e-6  # norms of it are in float32


class Deciding(nn.Module):
    """Its functions depend on numbers in a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        if y.sum() > 0:
            y = y + 1
        result: torch.Tensor = self.b(y)
        return result


def test_the_first_cause_is_named() -> None:
    with pytest.raises(ArgumentError, match="torch cannot export the module") as error:
        split(Deciding(), ["b"], torch.ones(2, 4))
    text = str(error.value)
    assert "data-dependent" in text
    assert "test_exports_of_models.py" in text and "if y.sum() > 0" in text


class Counting(nn.Module):
    """A model whose results have a number of its batch, if it counts."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.first, self.second, self.counts = nn.Linear(4, 4), nn.Linear(4, 2), counts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.first(x))
        return self.second(y / x.shape[0] if self.counts else y)


def test_numbers_of_the_example() -> None:
    """A length that became a number in torch's graph would be another micro-batch's."""
    x, target = torch.randn(6, 4), torch.randn(6, 2)
    for counts in (False, True):
        net = Counting(counts)
        stages = split(net, ["second"], torch.ones(2, 4))

        def step(backend: Backend, rows: int, stages: Any = stages) -> Any:
            table = schedules.gpipe(2, 2)
            pipe = Pipeline(stages, table, nn.MSELoss(reduction="sum"), backend=backend)
            return pipe.step(x[:rows], target[:rows])

        def wanted(rows: int, net: Any = net) -> Any:
            pairs = zip(x[:rows].chunk(2), target[:rows].chunk(2), strict=True)
            return sum(nn.functional.mse_loss(net(a), b, reduction="sum") for a, b in pairs)

        torch.testing.assert_close(linop.launch(partial(step, rows=4), 2)[1], wanted(4))
        if counts:
            with pytest.raises(ArgumentError, match=r"of shapes \[\(2, 4\)\], and .* \[\(3, 4\)\]"):
                linop.launch(partial(step, rows=6), 2)
        else:
            torch.testing.assert_close(linop.launch(partial(step, rows=6), 2)[1], wanted(6))


class OfTokens(nn.Module):
    """A model whose results have a number of its sequences, and none of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)) / x.shape[1])


def test_numbers_of_another_dimension() -> None:
    """The lengths of sequences are numbers, too; that of the batch is free then."""
    stages = split(OfTokens(), ["second"], torch.ones(2, 3, 4))

    def step(backend: Backend, rows: int, tokens: int) -> Any:
        pipe = Pipeline(stages, schedules.gpipe(2, 2), nn.MSELoss(reduction="sum"), backend=backend)
        return pipe.step(torch.ones(rows, tokens, 4), torch.ones(rows, tokens, 2))

    linop.launch(partial(step, rows=6, tokens=3), 2)
    with pytest.raises(ArgumentError, match="numbers of their dimension 1; micro-batches"):
        linop.launch(partial(step, rows=4, tokens=5), 2)


def test_models_without_values() -> None:
    """On the meta device shapes alone are compared."""
    with torch.device("meta"):
        net, x = Counting(False), torch.ones(2, 4)
    assert len(split(net, ["second"], x)) == 2


class Telling(nn.Module):
    """It returns None and a number beside tensors, of which one is of an earlier stage."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        y = self.a(x)
        return {"cache": None, "out": self.b(y), "first": y, "width": 4}


def test_results_that_are_no_tensors() -> None:
    net, x = Telling(), torch.randn(6, 4)
    stages = split(net, ["b"], torch.ones(2, 4))
    wanted = net(x)

    def loss(results: Any, target: torch.Tensor) -> Any:
        assert results[0] is None and results[3] == 4
        return ((results[1] - target) ** 2).sum() + results[2].sum()

    def program(backend: Backend) -> Any:
        table = schedules.one_forward_one_backward(2, 3)
        pipe = Pipeline(stages, table, loss, backend=backend)
        value = pipe.step(x, x)
        with torch.no_grad():
            return value, pipe(x)

    value, found = linop.launch(program, 2)[1]
    torch.testing.assert_close(value, loss([*wanted.values()], x))
    assert found[0] is None
    torch.testing.assert_close(found[1:3], [wanted["out"], wanted["first"]])
