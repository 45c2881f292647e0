"""Loaders of parts of batches, some of which are empty: contracts for threads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from linop.backends.engine.base import Backend
from linop.errors import ArgumentError
from linop.layers.agreement.input_agreement import agreement_of
from linop.strategies import Mesh, Parts, loader

Tensor = Any


@dataclass
class Batch:
    """A class that torch's pytrees do not know."""

    x: Tensor


def refuses_batches_without_rows(backend: Backend) -> None:
    """If a worker may have no row, all are told of batches of which there is none without rows.
    Two workers."""
    axis = Mesh(backend, dp=-1)["dp"]
    data = [torch.tensor([float(k), 1.0, 2.0]) for k in range(5)]

    def dims(rows: Any) -> Any:
        return torch.stack(rows, 1)

    def number(rows: Any) -> Any:
        return torch.stack(rows), torch.tensor(len(rows))

    def record(rows: Any) -> Any:
        return Batch(torch.stack(rows))

    def positions(rows: Any) -> Any:
        return {"x": torch.stack(rows), "at": torch.zeros(1, 3)}

    for collate, words in (
        (dims, r"a tensor of shape \(3, 1\) for 1 row;"),
        (number, r"a tensor of shape \(\) for 1 row;"),
        (record, "Batch for 1 row"),
        (positions, r"a tensor of shape \(1, 3\) for 2 rows"),
    ):
        with pytest.raises(ArgumentError, match=f"batch of 1 row leaves .*{words}.*drop_last=True"):
            loader(data, axis, batch_size=4, collate_fn=collate)
        with pytest.raises(ArgumentError, match="batch_size=2 or more"):
            loader(data, axis, batch_size=1, collate_fn=collate)
        for options in {"batch_size": 4, "drop_last": True}, {"batch_size": 3}:
            every = list(loader(data, axis, collate_fn=collate, **options))
            assert len(every) == (1 if "drop_last" in options else 2)
        assert not list(loader([], axis, batch_size=1, collate_fn=collate))
    named = [{"x": torch.ones(2), "name": "a"}] * 3
    with pytest.raises(ArgumentError, match="collate_fn gives str for 1 row"):
        loader(named, axis, batch_size=2)


def takes_structures_without_rows(backend: Backend) -> None:
    """Of dicts and tuples of rows, and None, there are batches of no rows; a collate_fn of one's
    own may take an empty list. Two workers."""
    axis = Mesh(backend, dp=-1)["dp"]
    data = [{"x": torch.ones(2), "y": (k, 1.0)} for k in range(3)]

    def masked(rows: Any) -> Any:
        return torch.utils.data.default_collate(rows) | {"mask": None}

    batch = list(loader(data, axis, batch_size=2, collate_fn=masked))[-1]
    rows = 1 - axis.index
    assert batch["x"].shape == (rows, 2)
    assert batch["y"][0].dtype is torch.int64
    assert batch["y"][0].tolist() == [2] * rows
    assert batch["mask"] is None
    parts = Parts(data, axis, batch_size=2)
    own = torch.utils.data.DataLoader(data, batch_sampler=parts, collate_fn=Batch)
    assert len(list(own)[-1].x) == rows


def is_brought_in_step(backend: Backend) -> None:
    """A worker that begins a pass alone has another epoch, until it is set. Two workers."""
    axis = Mesh(backend, dp=-1)["dp"]
    batches = loader(range(8), axis, batch_size=4, shuffle=True)
    parts: Any = batches.batch_sampler
    if axis.index == 0:
        next(iter(batches))
    assert parts.epoch == 1 - axis.index
    parts.set_epoch(0)
    mine = [int(k) for batch in batches for k in batch]
    found = agreement_of(backend).gather_objects(mine, "compare rows")
    assert sorted(k for one in found for k in one) == list(range(8))
    assert parts.epoch == 1
