"""Operators of torch's ``c10d`` namespaces, and the functional ones that torch's own strategies and
DTensor call, read as collectives in MPI's words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

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
"""By the name of the operator."""
_FUNCTIONAL = {
    "all_reduce": "all_reduce",
    "broadcast": "broadcast",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "shard_dim_alltoall": "all_to_all",
    "isend": "send",
    "irecv": "receive",
}
"""Collectives that return what they receive, by their names without the endings ``_``, ``_out`` and
``_coalesced``. The operators of c10d that they call in turn are not seen."""
NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
"""Of operators that may be collectives."""
IN_MEMORY = {"all_reduce", "broadcast", "reduce", "scatter"}
"""Collectives for which gloo takes elements in the order of memory, whatever the strides of tensors
are; before others it makes them contiguous."""
_TARGET_FIRST = {"all_gather", "reduce_scatter", "gather", "scatter", "all_to_all"}
"""Collectives whose operators take results before arguments."""
_ROOTED = {"broadcast", "reduce", "gather", "scatter", "send", "receive"}
_REDUCTIONS = {0: "sum", 1: "average", 2: "product", 3: "minimum", 4: "maximum"}
"""By the numbers of ``c10d::ReduceOp``."""
_SHORT = {"avg": "average", "min": "minimum", "max": "maximum"}
"""Reductions of functional ones that have other names."""


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
    functional: bool = False

    def plain(self) -> dict[str, Any]:
        return {
            name: value for name, value in vars(self).items() if name not in ("tensors", "changed")
        }


def is_functional(func: Any) -> bool:
    """True if an operator returns what it receives, in memory of its own."""
    short = func._schema.name.partition("::")[2]
    return func.namespace != "c10d" and not short.endswith(("_", "_out"))


def described(func: Any, args: Sequence[Any], kwargs: Any, result: Any) -> list[Described]:
    """The collectives of a call of an operator, one for each tensor of a coalesced one; none if it
    is another operator, such as a barrier.

    Args:
        result: what a functional one has returned.
    """
    if func.namespace == "c10d":
        found = _of_c10d(func, args)
        return [] if found is None else [found]
    return list(_functional(func, args, kwargs, result))


def _functional(func: Any, args: Sequence[Any], kwargs: Any, result: Any) -> Iterator[Described]:
    """The collectives of a call of a functional operator."""
    short = func._schema.name.partition("::")[2]
    plain = short.removesuffix("_").removesuffix("_out").removesuffix("_coalesced")
    name = _FUNCTIONAL.get(plain)
    names = [one.name for one in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
    group = given.get("group_name")
    if name is None or group is None:
        return
    if isinstance(group, str):
        resolve: Any = vars(c10d)["_resolve_process_group"]
        group = resolve(group)
    ranks = tuple(dist.get_process_group_ranks(group))
    sources = _listed(given[names[0]])
    if is_functional(func):
        targets = _listed(result)
    else:
        targets = _listed(given["out"]) if "out" in given else sources
    reduction = str(given.get("reduce_op", "")).lower()
    peer = given.get("src", given.get("dst", -1))
    peer = ranks[peer] if 0 <= peer < len(ranks) else peer
    splits = None
    if "output_split_sizes" in given:
        splits = ([*given["input_split_sizes"]], [*given["output_split_sizes"]])
    for source, target in zip(sources, targets, strict=True):
        one, other = [source], [target]
        if plain == "shard_dim_alltoall":
            one = [*source.chunk(len(ranks), given["shard_dim"])]
            other = [*target.chunk(len(ranks), given["gather_dim"])]
        one, other = (
            [] if name == skip else of for skip, of in (("receive", one), ("send", other))
        )
        yield Described(
            name,
            ranks,
            _SHORT.get(reduction, reduction),
            peer,
            [tuple(each.shape) for each in one],
            [tuple(each.shape) for each in other],
            splits,
            str(source.dtype).removeprefix("torch."),
            _axis(group),
            [] if name == "broadcast" and dist.get_rank() != peer else one,
            other,
            is_functional(func),
        )


def _axis(group: Any) -> str:
    """The axis of the mesh that a group is; empty if it is none."""
    title = str(getattr(group, "group_desc", ""))
    return title.removeprefix("mesh_") if title.startswith("mesh_") else ""


def _of_c10d(func: Any, args: Sequence[Any]) -> Described | None:
    """The collective of a call of an operator of c10d; None if it is none."""
    short = func._schema.name.partition("::")[2]
    name = _NAMES.get(short)
    if name is None:
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
        _axis(group),
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
