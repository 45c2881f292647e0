"""Functions that move tensors between the ranks of a job, drawn: chains of collectives, each with a
backward written by hand, that is right or has a fault. What ranks record of them is written to
files."""

from __future__ import annotations

import itertools
import pickle
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from support import preloaded

WORLD = 4
GROUPS: dict[tuple[int, ...], Any] = {}
"""The process groups of all sets of ranks."""
FAULTS = "", "", "twice", "flipped", "first lost", "left out", "summed once more"


@dataclass(frozen=True)
class Link:
    """A movement of a chain.

    Attributes:
        groups: a partition of the ranks; each group moves its own tensors.
        roots: the ranks that groups send from, or to, by their first rank.
        rows: of an all-to-all, what each rank sends to each other one.
        order: of messages, the rank that each sends to.
        way: which of several functions of torch is called.
        sizes, after: the elements that ranks have before and after it.
    """

    name: str
    groups: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    after: tuple[int, ...]
    roots: tuple[int, ...] = ()
    rows: tuple[tuple[int, ...], ...] = ()
    order: tuple[int, ...] = ()
    way: int = 0

    def back(self) -> Link:
        """The link whose forward is this one's adjoint."""
        name = _ADJOINTS.get(self.name, self.name)
        rows = tuple(zip(*self.rows, strict=True))
        order = tuple(self.order.index(k) for k in range(len(self.order)))
        return Link(
            name, self.groups, self.after, self.sizes, self.roots, rows, order, (self.way + 1) % 3
        )


_ADJOINTS = {"broadcast": "reduce", "all_gather": "reduce_scatter", "gather": "scatter"}
_ADJOINTS |= {b: a for a, b in _ADJOINTS.items()}
_MADE = ["all_reduce", "mean", "broadcast", "reduce", "all_gather", "reduce_scatter", "gather",
         "scatter", "all_to_all", "messages", "residual", "flip", "double", "turned"]  # fmt: skip


def drawn(seed: int) -> tuple[list[Link], int, str]:
    """A chain, the link whose backward has a fault, and the fault, if it has one."""
    draw = random.Random(seed)
    sizes: tuple[int, ...] = (draw.choice((4, 12, 24)),) * WORLD
    if draw.random() < 0.3:
        sizes = tuple(draw.randint(0, 9) for _ in range(WORLD))
    links = []
    for _ in range(draw.randint(1, 3)):
        link = _link(draw, sizes)
        links.append(link)
        sizes = link.after
    return links, draw.randrange(len(links)), draw.choice(FAULTS)


def _link(draw: random.Random, sizes: tuple[int, ...]) -> Link:
    groups = draw.choice([((0, 1, 2, 3),), ((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 1, 3), (2,))])
    while True:
        name = draw.choice(_MADE)
        roots = tuple(draw.choice(group) for group in groups)
        about: dict[str, Any] = {"way": draw.randrange(3)}
        after = list(sizes)
        alike = all(len({sizes[r] for r in group}) == 1 for group in groups)
        for group, root in zip(groups, roots, strict=True):
            for r in group:
                if name == "all_gather":
                    after[r] = sizes[r] * len(group)
                elif name == "reduce_scatter":
                    after[r] = sizes[r] // len(group)
                elif name == "gather":
                    after[r] = sizes[r] * len(group) * (r == root)
                elif name == "scatter":
                    after[r] = sizes[root] // len(group)
        if name in ("broadcast", "reduce", "gather", "scatter"):
            about["roots"] = roots
        if name in ("reduce_scatter", "scatter"):
            if any(sizes[r] % len(group) for group in groups for r in group):
                continue
        if name == "all_to_all":
            groups = (tuple(range(WORLD)),)
            about["rows"] = tuple(_cut(draw, n) for n in sizes)
            after = [sum(row[k] for row in about["rows"]) for k in range(WORLD)]
        if name == "messages":
            about["order"] = tuple(draw.sample(range(WORLD), WORLD))
            after = [sizes[about["order"].index(k)] for k in range(WORLD)]
        if name == "turned" and any(n % 2 for n in sizes):
            continue
        if alike or name in ("all_to_all", "messages", "flip", "double", "turned", "scatter"):
            return Link(name, groups, sizes, tuple(after), **about)


def _cut(draw: random.Random, n: int) -> tuple[int, ...]:
    cuts = sorted(draw.randint(0, n) for _ in range(WORLD - 1))
    return tuple(b - a for a, b in itertools.pairwise((0, *cuts, n)))


def run(link: Link, x: Tensor) -> Tensor:
    """A link, on this rank."""
    rank = dist.get_rank()
    at, group = next((k, g) for k, g in enumerate(link.groups) if rank in g)
    pg, n = GROUPS[group], len(group)
    root = link.roots[at] if link.roots else -1
    made: Tensor = _RUN[link.name](link, x, pg, n, root)
    return made


def _all_reduce(link: Link, x: Tensor, pg: Any, n: int, root: int) -> Tensor:
    y = x.clone() if link.way else torch.cat([x[:1], x[1:]])
    work = dist.all_reduce(y, group=pg, async_op=link.way == 2)
    if work is not None:
        work.wait()
    return y


def _mean(link: Link, x: Tensor, pg: Any, n: int, root: int) -> Tensor:
    return _all_reduce(link, x, pg, n, root) / n if link.way else _all_reduce(link, x / n, pg, n, 0)


def _broadcast(link: Link, x: Tensor, pg: Any, n: int, root: int) -> Tensor:
    y = x.clone()
    dist.broadcast(y, root, group=pg)
    return y


def _reduce(link: Link, x: Tensor, pg: Any, n: int, root: int) -> Tensor:
    y = x.clone()
    dist.reduce(y, root, group=pg)
    return y if dist.get_rank() == root else torch.zeros_like(x)


def _all_gather(link: Link, x: Tensor, pg: Any, n: int, root: int) -> Tensor:
    if link.way:
        parts = [torch.empty_like(x) for _ in range(n)]
        dist.all_gather(parts, x, group=pg)
        return torch.cat(parts)
    y = x.new_empty(n * len(x))
    dist.all_gather_into_tensor(y, x, group=pg)
    return y


def _reduce_scatter(link: Link, x: Tensor, pg: Any, n: int, root: int) -> Tensor:
    y = x.new_empty(len(x) // n)
    if link.way == 0:
        dist.reduce_scatter_tensor(y, x.contiguous(), group=pg)
    elif link.way == 1:
        dist.reduce_scatter(y, [one.contiguous() for one in x.chunk(n)] if len(x) else
                            [x.clone() for _ in range(n)], group=pg)  # fmt: skip
    else:
        whole = x.clone()
        dist.all_reduce(whole, group=pg)
        at = dist.get_group_rank(pg, dist.get_rank()) * len(y)
        y.copy_(whole[at : at + len(y)])
    return y


def _gather(link: Link, x: Tensor, pg: Any, n: int, root: int) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(n)] if dist.get_rank() == root else None
    dist.gather(x, parts, root, group=pg)
    return x.new_zeros(link.after[dist.get_rank()]) if parts is None else torch.cat(parts)


def _scatter(link: Link, x: Tensor, pg: Any, n: int, root: int) -> Tensor:
    rank = dist.get_rank()
    y = x.new_empty(link.after[rank])
    dist.scatter(y, [one.clone() for one in x.reshape(n, -1)] if rank == root else None, root,
                 group=pg)  # fmt: skip
    return y


def _all_to_all(link: Link, x: Tensor, pg: Any, n: int, root: int) -> Tensor:
    rank = dist.get_rank()
    sent, got = list(link.rows[rank]), [row[rank] for row in link.rows]
    y = x.new_empty(sum(got))
    dist.all_to_all_single(y, x.contiguous(), got, sent, group=pg)
    return y


def _messages(link: Link, x: Tensor, pg: Any, n: int, root: int) -> Tensor:
    rank = dist.get_rank()
    to, source = link.order[rank], link.order.index(rank)
    y = x.new_empty(link.sizes[source])
    if to == rank:
        return x.clone()
    if link.way == 0:
        ends = dist.P2POp(dist.isend, x.contiguous(), to), dist.P2POp(dist.irecv, y, source)
        for one in dist.batch_isend_irecv(list(ends)):
            one.wait()
        return y
    sending = dist.isend(x.contiguous(), to)
    if link.way == 1:
        dist.recv(y, source)
    else:
        receiving = dist.irecv(y, source)
        assert receiving is not None
        receiving.wait()
    assert sending is not None
    sending.wait()
    return y


def _residual(link: Link, x: Tensor, pg: Any, n: int, root: int) -> Tensor:
    return x - 3 * _all_reduce(link, x, pg, n, root)


_RUN: dict[str, Any] = {
    "all_reduce": _all_reduce,
    "mean": _mean,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
    "messages": _messages,
    "residual": _residual,
    "flip": lambda link, x, *about: x.flip(0),
    "double": lambda link, x, *about: x * 2,
    "turned": lambda link, x, *about: x.view(*((2, -1) if link.way else (-1, 2))).t().flatten(),
}


def _turned_back(link: Link, y: Tensor) -> Tensor:
    return y.view(*((-1, 2) if link.way else (2, -1))).t().flatten()


def run_back(link: Link, y: Tensor, fault: str) -> Tensor:
    """The adjoint of a link, on this rank; or what a fault makes of it."""
    if fault == "left out" and link.sizes == link.after:
        return y
    x = _turned_back(link, y) if link.name == "turned" else run(link.back(), y)
    if fault == "twice":
        return 2 * x
    if fault == "flipped":
        return x.flip(0)
    if fault == "first lost":
        x = x.clone()
        x[:1] = 0
    alike = all(len({link.sizes[r] for r in group}) == 1 for group in link.groups)
    if fault == "summed once more" and alike:
        group = next(g for g in link.groups if dist.get_rank() in g)
        x = x.clone()
        dist.all_reduce(x, group=GROUPS[group])
    return x


class Moved(torch.autograd.Function):
    """A chain, with its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, links: Any, at: int, fault: str) -> Tensor:
        ctx.about = links, at, fault
        for link in links:
            x = run(link, x)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (y,) = gradients
        links, at, fault = ctx.about
        for k in reversed(range(len(links))):
            y = run_back(links[k], y, fault if k == at else "")
        return y, None, None, None


def recorded(seed: int) -> Any:
    """Records of this rank of a drawn function: its record, and as arrays the argument, the
    result, the result's gradient and the argument's."""
    from linop.testing.parallel.recording.recorder import Recorder
    from linop.testing.parallel.recording.records import Record

    links, at, fault = drawn(seed)
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(100 * seed + rank)

    def numbers(n: int) -> Tensor:
        """Multiples of what groups divide by, so that all is exact."""
        return 12.0**3 * torch.randint(-1000, 1000, (n,), generator=generator).double()

    recorder = Recorder()
    x, gradient = numbers(links[0].sizes[rank]).requires_grad_(), numbers(links[-1].after[rank])
    with recorder.recording(torch.nn.Module(), str):
        y = Moved.apply(x, links, at, fault)  # type: ignore[no-untyped-call]
        y.backward(gradient)
    assert x.grad is not None
    arrays = [one.detach().numpy() for one in (x, y, gradient, x.grad)]
    record = Record(rank, 0.0, [], recorder.calls, recorder.collectives, {}, lifted=recorder.lifted)
    return record, arrays


def of_all_ranks(seeds: Sequence[int]) -> dict[int, list[Any]]:
    """By seed, what all ranks record (`recorded`), in a job of torch.distributed."""
    with tempfile.TemporaryDirectory() as folder:
        preloaded.spawn(_rank, (folder, list(seeds)), WORLD)
        parts = [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(WORLD)]
    return {seed: [part[seed] for part in parts] for seed in seeds}


def _rank(rank: int, folder: str, seeds: Sequence[int]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank,
                            world_size=WORLD)  # fmt: skip
    for n in range(1, WORLD + 1):
        for ranks in itertools.combinations(range(WORLD), n):
            GROUPS[ranks] = dist.new_group(list(ranks))
    found = {seed: recorded(seed) for seed in seeds}
    Path(folder, str(rank)).write_bytes(pickle.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
