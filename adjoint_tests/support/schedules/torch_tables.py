"""torch's own schedules, as it makes them without processes. Needs torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.pipelining import schedules


@contextmanager
def torch_schedule(
    name: str, p: int, micro_batches: int, chunks: int = 1, **options: Any
) -> Iterator[Any]:
    """torch's schedule of p ranks with `chunks` stages each, as rank 0 makes it."""
    from torch.distributed.pipelining import PipelineStage
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=p, store=FakeStore())
    try:
        stages = [
            PipelineStage(torch.nn.Identity(), stage, p * chunks, torch.device("cpu"))
            for stage in range(0, p * chunks, p)
        ]
        kind = getattr(schedules, name)
        single = issubclass(kind, schedules.PipelineScheduleSingle)
        yield kind(stages[0] if single else stages, micro_batches, **options)
    finally:
        torch.distributed.destroy_process_group()


def text(order: dict[int, list[object]]) -> str:
    """An order as torch's `_dump_csv` writes it."""
    cells = [["" if action is None else str(action) for action in row] for row in order.values()]
    return "\n".join(",".join(row) for row in cells)
