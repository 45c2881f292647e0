"""Keys and values in a cache keep their layout in later calls of a tensor-parallel net, also if
they are put in other orders, or cut off, in between."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

import torch
from torch import nn

import linop
from linop.backends import Backend
from linop.errors import PartitionError
from linop.strategies import ColwiseParallel, Mesh, RowwiseParallel, parallelize_module
from support.layers.cases import normal, same
from support.models.packages import missing

DOINGS = ("nothing", "reorder", "crop", "double", "copy")


class Layer:
    """Of a cache, as those of transformers."""

    keys: Any = None


class Cache:
    def __init__(self) -> None:
        self.layers = [Layer()]

    def change(self, doing: str) -> None:
        one = self.layers[0]
        if doing == "reorder":
            one.keys = one.keys.index_select(0, torch.tensor([1, 0, 1]))
        elif doing == "crop":
            one.keys = one.keys[:, :, :-1]
        elif doing == "double":
            one.keys = one.keys * 2
        elif doing == "copy":
            one.keys = one.keys.clone()


class Remembers(nn.Module):  # type: ignore[misc]  # torch is not typed here
    """Attention of a kind, to all tokens that there have been."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 12), nn.Linear(12, 4)
        self.returns_objects = True
        self.double()

    def forward(self, x: Any, cache: Any = None) -> Any:
        tells = cache is None or isinstance(cache, tuple)
        made = Cache() if cache is None else cache
        if isinstance(cache, tuple):
            made = Cache()
            (made.layers[0].keys,) = cache
        y = self._attended(x, made)
        if not tells:
            return y
        return (y, made) if self.returns_objects else (y, (made.layers[0].keys,))

    def _attended(self, x: Any, cache: Cache) -> Any:
        h = self.up(x).unflatten(-1, (-1, 2)).transpose(1, 2)  # (batch, heads, tokens, 2)
        layer = cache.layers[0]
        layer.keys = h if layer.keys is None else torch.cat([layer.keys, h], 2)
        y = (h @ layer.keys.transpose(2, 3)).softmax(-1) @ layer.keys
        return self.down(y.transpose(1, 2).flatten(2))


@example(["reorder", "nothing", "crop"], 2)
@given(st.lists(st.sampled_from(DOINGS), min_size=1, max_size=4), st.integers(1, 3))
def test_changed_between_calls(doings: list[str], workers: int) -> None:
    base = Remembers()
    x = normal((3, 2, 4), 1)

    def outputs(net: Any) -> list[Any]:
        cache = Cache()
        found = [net(x, cache)]
        for doing in doings:
            cache.change(doing)
            found.append(net(x[:, :1], cache))
        return found

    wanted = outputs(base)

    def main(backend: Backend) -> None:
        plan = {"up": ColwiseParallel(heads=6), "down": RowwiseParallel(heads=6)}
        net = parallelize_module(copy.deepcopy(base), Mesh(backend, tp=-1)["tp"], plan)
        for one, other in zip(outputs(net), wanted, strict=True):
            same(one, other, 1e-12)

    linop.launch(main, workers, "threads")


@given(st.lists(st.sampled_from(DOINGS), max_size=3), st.booleans(), st.integers(1, 3))
def test_that_the_net_makes(doings: list[str], objects: bool, workers: int) -> None:
    """It returns a cache, an object or tensors, and is given it again; twice, and by turns."""
    base = Remembers()
    base.returns_objects = objects
    x = normal((3, 2, 4), 1)

    def outputs(net: Any) -> list[Any]:
        pairs = [net(x), net(x * 2)]
        for doing in doings:
            for k, (_, cache) in enumerate(pairs):
                if objects:
                    cache.change(doing)
                    pairs[k] = net(x[:, :1], cache), cache
                else:
                    pairs[k] = net(x[:, :1], cache)
        return [y for y, _ in pairs]

    wanted = outputs(base)

    def main(backend: Backend) -> None:
        plan = {"up": ColwiseParallel(heads=6), "down": RowwiseParallel(heads=6)}
        net = parallelize_module(copy.deepcopy(base), Mesh(backend, tp=-1)["tp"], plan)
        for one, other in zip(outputs(net), wanted, strict=True):
            same(one, other, 1e-12)

    linop.launch(main, workers, "threads")


def test_whole_tensors_in_a_cache() -> None:
    """A tensor as long as the whole is no block."""
    base = Remembers()

    def main(backend: Backend) -> None:
        plan = {"up": ColwiseParallel(heads=6), "down": RowwiseParallel(heads=6)}
        net = parallelize_module(copy.deepcopy(base), Mesh(backend, tp=-1)["tp"], plan)
        cache, x = Cache(), normal((3, 2, 4), 1)
        net(x, cache)
        cache.layers[0].keys = torch.zeros(3, 6, 2, 2).double()
        with pytest.raises(PartitionError, match="cat of whole tensors and ones that are split"):
            net(x, cache)

    linop.launch(main, 2, "threads")


@pytest.mark.skipif(bool(missing()), reason="models of other people are not installed")
@pytest.mark.parametrize("chosen", [{"num_beams": 3}, {"cache_implementation": "static"}])
def test_caches_of_transformers(chosen: dict[str, Any]) -> None:
    """Keys and values are reordered by beams, or put into a cache of fixed length."""
    from support.models.packages import torchvision

    torchvision()
    import transformers

    from linop.strategies import tp_plan

    config = transformers.Qwen3Config(
        vocab_size=20,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=4,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        base = transformers.Qwen3ForCausalLM(config).double().eval()
    words = torch.arange(8).view(2, 4) + 1
    options: Any = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, **chosen}
    mask = torch.ones_like(words)
    wanted = base.generate(words, attention_mask=mask, **options)

    def main(backend: Backend) -> None:
        axis = Mesh(backend, tp=-1)["tp"]
        net = parallelize_module(copy.deepcopy(base), axis, tp_plan(base, axis)).eval()
        assert torch.equal(net.generate(words, attention_mask=mask, **options), wanted)

    linop.launch(main, 2, "threads")
