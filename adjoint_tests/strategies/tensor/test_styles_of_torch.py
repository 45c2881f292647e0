"""Plans with styles of torch.distributed.tensor.parallel have one process's gradients."""

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
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor import parallel as torchs

import linop
from linop import strategies
from linop.backends import Backend
from linop.errors import ArgumentError
from linop.strategies import Mesh, check, parallelize_module
from support.layers.cases import normal


class Part(nn.Module):  # type: ignore[misc]  # torch is not typed here
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.up, self.gate, self.down = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: Any, scale: Any = None) -> Any:
        x = self.norm(x)
        y = self.down(torch.tanh(self.up(x)) * self.gate(x))
        return y if scale is None else y * scale


class Net(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.words, self.part, self.last = nn.Embedding(7, 4), Part(), nn.Linear(4, 7)
        self.double()

    def forward(self, words: Any) -> Any:
        x = self.words(words)
        return self.last(self.part(x, scale=x))


def plans() -> dict[str, dict[str, Any]]:
    """Styles by their names: a sequence that stays split, a part whose input is cut, and a part
    alone."""
    whole, split = Replicate(), Shard(1)
    in_part = {
        "part.norm": ("SequenceParallel", {}),
        "part.up": ("ColwiseParallel", {"input_layouts": split}),
        "part.gate": ("ColwiseParallel", {"input_layouts": split, "output_layouts": Shard(-1)}),
        "part.down": ("RowwiseParallel", {"output_layouts": split}),
    }
    words = {"input_layouts": whole, "output_layouts": split}
    last = {"input_layouts": split, "output_layouts": whole}
    inner = {
        "input_layouts": (whole,),
        "desired_input_layouts": (split,),
        "input_kwarg_layouts": {"scale": whole},
        "desired_input_kwarg_layouts": {"scale": split},
    }
    outer = {"output_layouts": split, "desired_output_layouts": whole}
    cut_inside = {**inner, **outer}
    return {
        "sequence": {
            "words": ("RowwiseParallel", words),
            **in_part,
            "last": ("ColwiseParallel", last),
        },
        "input": {"part": ("PrepareModuleInput", inner), **in_part},
        "both": {"part": ("PrepareModuleInputOutput", cut_inside), **in_part},
        "features": {
            "words": ("ColwiseParallel", {"output_layouts": whole}),
            "part.[ug]*": ("ColwiseParallel", {}),
            "part.down": ("RowwiseParallel", {}),
            "last": ("PrepareModuleOutput", {**outer, "output_layouts": whole}),
        },
    }


@example("input", 1, set())  # where nothing moves
@given(st.sampled_from([*plans()]), st.integers(1, 3), st.sets(st.integers(0, 6)))
def test_gradients(which: str, workers: int, own: set[int]) -> None:
    """Styles of linop may stand beside them."""
    base, target = Net(), normal((2, 5, 7), 1)
    words = torch.arange(10).view(2, 5) % 7
    plan = {
        name: getattr(strategies if k in own else torchs, kind)(**options)
        for k, (name, (kind, options)) in enumerate(plans()[which].items())
    }
    if which == "input":
        plan["last"] = strategies.ColwiseParallel(1, linop.REPLICATED)

    def loss(y: Any, target: Any) -> Any:
        return (y - target).square().sum()

    def main(backend: Backend) -> None:
        net = parallelize_module(copy.deepcopy(base), Mesh(backend, tp=-1)["tp"], plan)
        assert check(net, base, (words, target), loss) < 1e-12

    linop.launch(main, workers, "threads")


def test_one_style() -> None:
    base = nn.Linear(4, 3)

    def main(backend: Backend) -> None:
        style = torchs.ColwiseParallel(output_layouts=Replicate())
        net = parallelize_module(copy.deepcopy(base), Mesh(backend, tp=-1)["tp"], style)
        torch.testing.assert_close(net(torch.ones(2, 4)), base(torch.ones(2, 4)))

    linop.launch(main, 2, "threads")


class Other(torchs.ColwiseParallel):  # type: ignore[misc]
    """A class of somebody's."""


def test_mistakes() -> None:
    def main(backend: Backend) -> None:
        axis = Mesh(backend, tp=-1)["tp"]
        for style, words in (
            (Other(), r"test_styles_of_torch\.Other given; of the styles of torch\.dist"),
            (torchs.RowwiseParallel(), r"which is torch's default, of an Embedding, whose"),
            (torchs.ColwiseParallel(output_layouts=Partial()), r"'words': output_layouts=Part"),
            (3, r"of linop\.strategies, or of torch\.distributed\.tensor\.parallel, expected"),
        ):
            with pytest.raises(ArgumentError, match=words):
                parallelize_module(Net(), axis, {"words": style})

    linop.launch(main, 1, "threads")
