"""Complaints of users of other libraries, replayed in ours. The page on strategies has their table,
with what keeps each from happening here."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

from support.requirements import needs_mpi
from support.strategies import complaints
from support.strategies.pipelines.pipelines import (
    Case,
    clips_as_one_process,
    is_one_process,
    is_the_delayed_loop,
    ties_weights,
)
from support.strategies.pipelines.saved_bytes import forgets_outputs
from support.strategies.tensor import tensor_parallel
from support.workers import on_ranks, on_threads

PAGE = Path(__file__).resolve().parents[2] / "docs" / "strategies.md"
COMPOSED = "Megatron-LM #7452, torchtitan #1733, torchtitan #2972, DeepSpeed #7773, DeepSpeed #966"
REPLAYS: list[tuple[str, int, Callable[..., None], tuple[Any, ...]]] = [
    (COMPOSED, 4, complaints.composed_axes, ("tensor",)),
    (COMPOSED, 4, complaints.composed_axes, ("shards",)),
    ("Megatron-LM #1446", 3, tensor_parallel.norms_agree, ()),
    ("Megatron-LM #844", 2, complaints.tied_embeddings, ()),
    ("Megatron-LM #844", 3, ties_weights, (Case("1f1b", 3, 2),)),
    ("nanotron #46", 3, tensor_parallel.row_parallel_alone, ()),
    ("pytorch #180952", 3, is_one_process, (Case("zb-h1", 3, 4, tied=True),)),
    ("pytorch #172668", 2, complaints.blocked_sends, ()),
    ("pytorch #120386", 3, tensor_parallel.takes_any_strides, ()),
    ("pipedream #62", 2, is_the_delayed_loop, (Case("pipedream", 2, 4),)),
    ("memcnn #56", 1, complaints.dropout_in_a_reversible_block, ()),
    ("torchtitan #596", 3, clips_as_one_process, (Case("1f1b", 3, 2),)),
    ("torchtitan #596", 2, tensor_parallel.clips_the_norm_of_all, ()),
    ("pytorch #128910", 2, forgets_outputs, (Case("1f1b", 2, 4),)),
]
EVERY = pytest.mark.parametrize(
    ("workers", "contract", "arguments"),
    [
        pytest.param(*rest, id=f"{issue}: {rest[1].__name__}".replace(" #", "-"))
        for issue, *rest in REPLAYS
    ],
)


@EVERY
def test_complaint(workers: int, contract: Any, arguments: Any) -> None:
    on_threads(workers, contract, *arguments)


@needs_mpi
def test_complaints_on_ranks() -> None:
    for _, workers, contract, arguments in REPLAYS[:2]:
        on_ranks(workers, contract, *arguments, watch=120.0)


@pytest.mark.parametrize("strategy", ["tensor", "shards"])
def test_a_hidden_division_is_found(strategy: str) -> None:
    """torch's mean over the workers, which is the commonest cause, is another gradient."""
    with pytest.raises(AssertionError, match=r"weight|bias"):
        on_threads(4, partial(complaints.composed_axes, reduction="mean"), strategy)


def test_every_complaint_is_on_the_page() -> None:
    wanted = {one for issue, *_ in REPLAYS for one in issue.split(", ")}
    table = PAGE.read_text().split("## Faults reported elsewhere")[1].split("\n## ")[0]
    found = set()
    for project, numbers in re.findall(r"([\w-]+) (#\d+(?:(?:,| and) #\d+)*)", table):
        found |= {f"{project} {number}" for number in re.findall(r"#\d+", numbers)}
    assert found == wanted
