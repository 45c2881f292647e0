"""Operators of torch's ``c10d`` namespaces, read as collectives in MPI's words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

_NAMES = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "broadcast_": "broadcast",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "send": "send",
    "recv_": "receive",
    "recv_any_source_": "receive",
}
"""By the name of the operator. The functional ones of ``_c10d_functional`` call these in turn."""
_TARGET_FIRST = {"all_gather", "reduce_scatter", "gather", "scatter", "all_to_all"}
"""Collectives whose operators take results before arguments."""
_ROOTED = {"broadcast", "reduce", "gather", "scatter", "send", "receive"}
_REDUCTIONS = {0: "sum", 1: "average", 2: "product", 3: "minimum", 4: "maximum"}
"""By the numbers of ``c10d::ReduceOp``."""


@dataclass
class Described:
    """A collective of a call.

    Attributes:
        tensors: what this rank contributes.
        changed: what it writes to.
    """

    name: str
    ranks: tuple[int, ...]
    reduction: str
    peer: int
    sent: list[tuple[int, ...]]
    received: list[tuple[int, ...]]
    splits: tuple[list[int], list[int]] | None
    dtype: str
    group: str
    tensors: list[torch.Tensor]
    changed: list[torch.Tensor]

    def plain(self) -> dict[str, Any]:
        return {
            name: value for name, value in vars(self).items() if name not in ("tensors", "changed")
        }


def described(func: Any, args: Sequence[Any]) -> Described | None:
    """The collective of a call of an operator; None if it is none, such as a barrier."""
    short = func._schema.name.partition("::")[2]
    name = _NAMES.get(short)
    if name is None or func.namespace != "c10d":
        return None
    lists = [_listed(one) for one in args if isinstance(one, torch.Tensor | list | tuple)]
    lists = [one for one in lists if one and isinstance(one[0], torch.Tensor)]
    group, reduction = _group(args), _reduction(args)
    if group is None or not lists:
        return None
    ranks = tuple(dist.get_process_group_ranks(group))
    ints = [one for one in args if type(one) is int]
    targets, sources = (lists[0], lists[-1]) if name in _TARGET_FIRST else (lists[0], lists[0])
    peer = -1
    if name in _ROOTED and ints and short != "recv_any_source_":
        peer = ranks[ints[0]]
    if name in ("gather", "scatter"):
        # The root alone gives a list of one tensor for each rank.
        if len(lists) == 1:
            targets, sources = ([], lists[0]) if name == "gather" else (lists[0], [])
    if name == "send":
        targets = []
    if name == "receive":
        sources = []
    given: Any = [] if name == "broadcast" and dist.get_rank() != peer else sources
    numbers = [one for one in args if isinstance(one, list) and (not one or type(one[0]) is int)]
    splits = (numbers[1], numbers[0]) if name == "all_to_all" and len(numbers) == 2 else None
    sent, received = ([tuple(one.shape) for one in side] for side in (sources, targets))
    title = str(getattr(group, "group_desc", ""))
    axis = title.removeprefix("mesh_") if title.startswith("mesh_") else ""
    dtype = str(lists[0][0].dtype).removeprefix("torch.")
    return Described(
        name,
        ranks,
        reduction,
        peer,
        sent,
        received,
        splits,
        dtype,
        axis,
        list(given),
        targets,
    )


def _listed(value: Any) -> list[Any]:
    """Tensors of an argument, lists of lists flattened."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [each for one in value for each in (one if isinstance(one, list | tuple) else [one])]


def _group(args: Sequence[Any]) -> Any:
    found = [one for one in args if _is_a(one, "ProcessGroup")]
    return dist.ProcessGroup.unbox(found[0]) if found else None


def _reduction(args: Sequence[Any]) -> str:
    found = [one.op() for one in args if _is_a(one, "ReduceOp")]
    return _REDUCTIONS.get(found[0], "other") if found else ""


def _is_a(value: Any, name: str) -> bool:
    return isinstance(value, torch.ScriptObject) and str(value._type()).endswith(f".{name}")
