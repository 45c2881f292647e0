"""`split` of models that keep caches, and of those that torch cannot export."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

if any(find_spec(name) is None for name in ("torch", "transformers")):
    pytest.skip(
        "torch or transformers is not installed: pip install 'linop-algebra[models]'",
        allow_module_level=True,
    )

import torch
from torch import nn

from linop.errors import ArgumentError
from linop.strategies import split
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
