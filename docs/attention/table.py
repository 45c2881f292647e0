"""The table of docs/attention.md: work, memory and bytes sent of attention whose sequence is cut.

    python docs/attention/table.py

All are counted: pairs of query and key, bytes that autograd keeps between forward and backward, and
bytes of messages by the counters of plans, of one step on threads, in float32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

import linop
from linop.layers.attention.cuts import in_order, work, zigzag
from linop.spaces.partition import balanced
from linop.strategies import ContextParallel, Mesh

PAGE = Path(__file__).resolve().parents[1] / "attention.md"
HEADS, FEATURES = 8, 16
CASES = [
    (1024, 8, 1, "ring", True),
    (1024, 8, 2, "ring", True),
    (1024, 8, 4, "ring", True),
    (1024, 8, 8, "ring", True),
    (1024, 8, 4, "ring", False),
    (1024, 2, 4, "ring", True),
    (1024, 8, 4, "ulysses", False),
    (1024, 2, 4, "ulysses", False),
    (1021, 8, 4, "ring", True),
    (1021, 8, 3, "ulysses", False),
]


def row(length: int, groups: int, workers: int, method: str, zigzagged: bool) -> list[Any]:
    """A row of the table."""

    def main(backend: Any) -> tuple[int, int]:
        cp = ContextParallel(Mesh(cp=-1)["cp"], method, zigzagged)
        tokens = len(cp.positions(length))
        kept: dict[int, int] = {}

        def pack(x: Any) -> Any:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        shapes = [(1, heads, tokens, FEATURES) for heads in (HEADS, groups, groups)]
        given = [torch.randn(shape, requires_grad=True) for shape in shapes]
        with saved_tensors_hooks(pack, lambda x: x):
            y = cp.scaled_dot_product_attention(*given, is_causal=True, enable_gqa=True)
        y.sum().backward()
        bulk = [row for row in cp.axis.backend.counters() if "call" not in row.operator]
        return sum(kept.values()), sum(row.bytes for row in bulk)

    found = linop.launch(main, workers)
    cut = zigzag(length, workers) if zigzagged else in_order(balanced(length, workers))
    if method == "ulysses":
        heads = balanced(HEADS, workers)
        share = max(heads) / (HEADS / workers)
    else:
        each = [work(segments) for segments in cut]
        share = max(each) / (sum(each) / workers)
    most, sent = max(kept for kept, _ in found), max(sent for _, sent in found)
    return [
        length,
        groups,
        workers,
        method,
        "zigzag" if zigzagged else "in order",
        f"{share:.3f}",
        f"{most / 1024:.0f}",
        f"{sent / 1024:.0f}",
    ]


def table() -> str:
    """The table, in Markdown."""
    titles = (
        "tokens",
        "groups",
        "workers",
        "method",
        "cut",
        "most work / mean",
        "kept KiB a worker",
        "sent KiB a worker",
    )
    rows = [titles, ["---"] * len(titles), *(row(*case) for case in CASES)]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in rows)


def page(text: str) -> str:
    """The page with a new table."""
    first, last = "<!-- table -->\n", "\n<!-- end of table -->"
    begin, rest = text.split(first)
    return f"{begin}{first}\n{table()}\n{last}{rest.split(last)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
