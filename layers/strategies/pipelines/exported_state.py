"""States of stages that torch exported: together they have the keys of the model's state, and no
others. torch keeps one of several names of a tensor, leaves out tensors that no stage computes
with, and makes buffers of constants and of buffers that are in no state.

A tensor that a stage is to have is named by a node of its graph whose value nobody uses: copies of
a graph's module have what its nodes name, and ``meta``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Module

if TYPE_CHECKING:
    from torch.fx import GraphModule

_KEYS = "linop_state_keys"
"""Name in ``meta``: keys of the model's state."""


def complete(graphs: Sequence[GraphModule], model: Module) -> None:
    """Give stages all keys of a model's state, and leave the others out of theirs.

    Args:
        graphs: modules of graphs, one for each stage, which have the model's parameters.
    """
    keys = list(model.state_dict())
    tensors = _tensors(model)
    names: dict[int, list[str]] = {}
    for key in keys:
        if key in tensors:
            names.setdefault(id(tensors[key]), []).append(key)
    own = [_tensors(graph) for graph in graphs]
    known = {key for one in own for key in one}
    for group in names.values():
        at, first = next(
            ((s, key) for s, one in enumerate(own) for key in group if key in one), (0, "")
        )
        tensor = own[at][first] if first else tensors[group[0]]
        for key in group:
            if key not in known:
                _add(graphs[at], key, tensor)
    for graph in graphs:
        graph.recompile()
        graph.meta[_KEYS] = tuple(keys)
        graph._register_deepcopy_hook(_leave_out)
        _leave_out(graph)


def _tensors(module: Module) -> Mapping[str, Tensor]:
    """Parameters and buffers by all their names."""
    every: Iterable[tuple[str, Tensor]] = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    return dict(every)


def _add(graph: GraphModule, key: str, tensor: Tensor) -> None:
    *path, name = key.split(".")
    owner: Module = graph
    for part in path:
        if part not in owner._modules:
            owner.add_module(part, torch.nn.Module())
        owner = owner.get_submodule(part)
    if name in vars(owner):  # torch leaves another name of a buffer as a plain attribute
        delattr(owner, name)
    if isinstance(tensor, torch.nn.Parameter):
        owner.register_parameter(name, tensor)
    else:
        owner.register_buffer(name, tensor)
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    with graph.graph.inserting_before(output):
        graph.graph.get_attr(key)


def _leave_out(graph: GraphModule) -> None:
    """Leave buffers that are not of the model's state out of the stage's."""
    keys: Collection[str] = graph.meta[_KEYS]
    for prefix, module in graph.named_modules():
        names = {name for name in module._buffers if f"{prefix}.{name}".lstrip(".") not in keys}
        # In place: stages of two modes share it.
        module._non_persistent_buffers_set.update(names)
