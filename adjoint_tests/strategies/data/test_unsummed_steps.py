"""Steps of optimizers with gradients that the workers have not summed are warned of, once; others
are not."""

from __future__ import annotations

import copy
import importlib.util
import warnings
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
from linop.strategies import DataParallel, Mesh
from linop.strategies.data.reducer import UnsummedGradientsWarning

DOINGS = ("kept", "summed", "reduce", "step", "zero", "none")
"""Of a loop: a backward in no_sync or outside of it, reduce_gradients, a step, and zero_grad in two
ways."""


def warned_of(doings: list[str], workers: int) -> int:
    """The number of warnings of a loop."""
    base = nn.Linear(3, 2)

    def main(backend: Backend) -> None:
        net = DataParallel(copy.deepcopy(base), Mesh(backend, dp=-1)["dp"], reduction="sum")
        optimizer = torch.optim.SGD(net.parameters(), 0.1)

        def backward() -> None:
            net(torch.ones(2, 3)).sum().backward()

        def kept() -> None:
            with net.no_sync():
                backward()

        does: dict[str, Any] = {
            "kept": kept,
            "summed": backward,
            "reduce": net.reduce_gradients,
            "step": optimizer.step,
            "zero": lambda: optimizer.zero_grad(set_to_none=False),
            "none": optimizer.zero_grad,
        }
        for doing in doings:
            does[doing]()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        linop.launch(main, workers, "threads")
    found = [one for one in caught if one.category is UnsummedGradientsWarning]
    assert all("call net.reduce_gradients() before it" in str(one.message) for one in found)
    assert all(one.filename == __file__ for one in found)
    return len(found)


@example(["kept", "step", "none", "kept", "step"], 2)
@example(["kept", "summed", "step"], 2)
@example(["kept", "step"], 1)
@given(st.lists(st.sampled_from(DOINGS), max_size=6), st.integers(1, 3))
def test_warnings(doings: list[str], workers: int) -> None:
    unsummed, wanted = False, 0
    for doing in doings:
        if doing == "kept":
            unsummed = True
        elif doing in ("summed", "reduce", "none"):
            unsummed = False
        elif doing == "step" and unsummed and workers > 1:
            wanted = 1
    assert warned_of(doings, workers) == wanted
