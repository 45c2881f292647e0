"""The table of docs/experts.md: rows, memory and bytes sent of mixtures of experts over workers.

    python docs/experts/table.py

All are counted, on threads, in float32: rows that experts get, parameters of experts, and bytes of
messages by the counters of plans, of one step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import linop
from linop import Partition, layers
from linop.layers.experts.losses import routed

PAGE = Path(__file__).resolve().parents[1] / "experts.md"
TOKENS, FEATURES, HIDDEN, EXPERTS, K = 1024, 32, 64, 8, 2
CASES = [(1, None), (2, None), (4, None), (8, None), (3, None), (4, 1.25), (4, 1.0)]
SKEWED = [(4, None), (4, 1.0)]


def row(workers: int, factor: float | None, skew: float) -> list[Any]:
    """A row of the table.

    Args:
        skew: added to the logits of expert 0.
    """
    P = Partition((workers,))
    torch.manual_seed(0)
    whole = torch.randn(TOKENS, FEATURES)
    whole[:, 0] = 1
    X = linop.TensorSpace(whole.shape, P)

    def main(backend: Any) -> Any:
        torch.manual_seed(1)
        net = layers.MixtureOfExperts(P, FEATURES, HIDDEN, EXPERTS, K, factor)
        if net.router is not None:
            with torch.no_grad():
                net.router[0, 0] += skew
        mine = whole[X.slices(backend.worker)].clone().requires_grad_()
        net(mine).sum().backward()
        parts = [p for p in (net.gate_up_proj, net.down_proj) if p is not None]
        bulk = [one for one in backend.counters() if one.operator.startswith("T")]
        sent = sum(one.bytes for one in bulk)
        return sum(p.numel() * p.itemsize for p in parts), sent, net.router

    found = linop.launch(main, workers)
    router = found[0][2].detach()
    indices, _ = routed(torch.nn.functional.linear(whole, router), K, True)
    capacity = None if factor is None else int(-(-factor * K * TOKENS // EXPERTS))
    routing = linop.Routing(indices.numpy(), EXPERTS, capacity)
    rows = [r.shape[0] for r in linop.dispatch(X, routing).codomain.regions]
    away = sum(_between(routing, X))
    return [
        workers,
        "all" if factor is None else factor,
        "one expert is liked" if skew else "drawn",
        f"{100 * (1 - len(routing.slots) / (K * TOKENS)):.1f}",
        f"{max(rows) / (sum(rows) / workers):.2f}",
        f"{max(size for size, _, _ in found) / 1024:.0f}",
        f"{4 * 4 * FEATURES * away / 1024:.0f}",
        f"{sum(sent for _, sent, _ in found) / 1024:.0f}",
    ]


def _between(routing: linop.Routing, X: linop.TensorSpace) -> list[int]:
    """Slots whose token is on another worker than their expert, by worker of the expert."""
    D = linop.dispatch(X, routing)
    ends = [X.slices(w)[0] for w in X.partition.workers]
    found, start = [], 0
    for w, region in enumerate(D.codomain.regions):
        tokens = routing.slots[start : start + region.shape[0]] // K
        start += region.shape[0]
        here = (tokens >= ends[w].start) & (tokens < ends[w].stop)
        found.append(len(tokens) - int(here.sum()))
    return found


def table() -> str:
    """The table, in Markdown."""
    titles = (
        "workers",
        "capacity factor",
        "routing",
        "dropped %",
        "most rows / mean",
        "experts, KiB a worker",
        "rows that leave, KiB",
        "sent, KiB",
    )
    cases = [(*case, 0.0) for case in CASES] + [(*case, 1.5) for case in SKEWED]
    rows = [titles, ["---"] * len(titles), *(row(*case) for case in cases)]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in rows)


def page(text: str) -> str:
    """The page with a new table."""
    first, last = "<!-- table -->\n", "\n<!-- end of table -->"
    begin, rest = text.split(first)
    return f"{begin}{first}\n{table()}\n{last}{rest.split(last)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
