"""Modules that a model calls several times, as the one layer of ALBERT: torch's export has a copy
of it for each further call, under the name ``layer@1``, with parameters of its own. Here each stage
has the parameters under the names of the model, once; stages that compute with the same one share
it, and a pipeline adds its gradients (`linop.strategies.pipelines.model.tied_weights`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Module

from linop.errors import ArgumentError

if TYPE_CHECKING:
    from torch.fx import Graph, GraphModule, Node

CALL = re.compile(r"@\d+")
"""In names: the number of a call, from 0."""


def merged(stage: GraphModule, own: Collection[str]) -> None:
    """Let the graph of a stage compute what its submodules do, if torch has several copies of one:
    then each tensor of the model is in it under its own name.

    Args:
        own: names of the model's parameters and buffers.
    """
    if not any(CALL.search(name) for name, _ in stage.named_modules()):
        return
    graph, kept = torch.fx.Graph(), dict[str, tuple[Module, str]]()
    graph.output(_computed(graph, stage, "", None, {}, own, kept))
    graph.set_codegen(stage.graph._codegen)
    found = {key: (owner, getattr(owner, name)) for key, (owner, name) in kept.items()}
    kinds = {key: _kind(owner, name) for key, (owner, name) in kept.items()}
    for held in (stage._modules, stage._parameters, stage._buffers):
        held.clear()
    for key, (_, value) in found.items():
        *path, name = key.split(".")
        inner: Module = stage
        for part in path:
            if part not in inner._modules:
                inner.add_module(part, torch.nn.Module())
            inner = inner.get_submodule(part)
        if kinds[key] == "buffer":
            inner.register_buffer(name, value)
        else:
            setattr(inner, name, value)
    stage.graph = graph


def _kind(owner: Module, name: str) -> str:
    return "buffer" if name in owner._buffers else "another"


def _computed(
    graph: Graph,
    module: Any,
    path: str,
    given: Sequence[Any] | None,
    named: Mapping[str, Any],
    own: Collection[str],
    kept: dict[str, tuple[Module, str]],
) -> Any:
    """The result of a module's graph, whose nodes are copied into another one.

    Args:
        path: of the module in the stage.
        given, named: its arguments; None for the placeholders of the stage itself.
        kept: filled with attributes that are read, by their names in the stage.
    """
    values: dict[Node, Any] = {}
    arguments = iter(given or ())

    def known(argument: Any) -> Any:
        return torch.fx.map_arg(argument, values.__getitem__)

    for node in module.graph.nodes:
        if node.op == "placeholder" and given is None:
            values[node] = graph.node_copy(node)
        elif node.op == "placeholder":
            target = str(node.target)
            values[node] = named[target] if target in named else next(arguments)
        elif node.op == "output":
            return known(node.args[0])
        elif node.op == "call_module" and hasattr(inner := _found(module, node.target), "graph"):
            inside = f"{path}{node.target}."
            some = known(node.args), known(node.kwargs)
            values[node] = _computed(graph, inner, inside, *some, own, kept)
        elif node.op in ("call_module", "get_attr"):
            key = f"{path}{node.target}"
            bare = CALL.sub("", key)
            key = bare if bare in own else key
            where, _, name = str(node.target).rpartition(".")
            kept.setdefault(key, (module.get_submodule(where), name))
            values[node] = graph.create_node(
                node.op, key, known(node.args), known(node.kwargs), type_expr=node.type
            )
            values[node].meta.update(node.meta)
        else:
            values[node] = graph.node_copy(node, values.__getitem__)
    return None


def _found(module: Module, target: Any) -> Any:
    return module.get_submodule(str(target))


def shared(stages: Sequence[Module]) -> list[tuple[str, ...]]:
    """Of each stage the names of its parameters that others have, too."""
    every = [dict(stage.named_parameters(remove_duplicate=False)) for stage in stages]
    return [
        tuple(key for key in own if any(key in one for one in every if one is not own))
        for own in every
    ]


def check_buffers(stages: Sequence[GraphModule], own: Collection[str]) -> None:
    """Check that no buffer that a stage writes to is in another one, too.

    Args:
        own: names of the model's buffers.

    Raises:
        ArgumentError: one is: as running statistics of a norm that is called in both.
    """
    users: dict[str, list[int]] = {}
    for s, stage in enumerate(stages):
        for key, _ in stage.named_buffers(remove_duplicate=False):
            users.setdefault(key, []).append(s)
    for stage in stages:
        for key in _written(stage):
            if key in own and len(users.get(key, ())) > 1:
                raise ArgumentError(
                    f"split: stages {', '.join(map(str, users[key]))} write to the buffer {key!r}, "
                    f"as a norm does that is called in each of them, and each would have one of "
                    f"its own; let all calls of this module be in one stage, or give the model "
                    f"several modules"
                )


def _written(stage: GraphModule) -> Iterator[str]:
    for node in stage.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or schema is None:
            continue
        norms = "batch_norm" in schema.name and dict(
            zip((one.name for one in schema.arguments), node.args, strict=False)
        ).get("training", False)
        for argument, value in zip(schema.arguments, node.args, strict=False):
            info = argument.alias_info
            writes = info is not None and info.is_write
            writes |= bool(norms) and argument.name.startswith("running_")
            if writes and getattr(value, "op", "") == "get_attr":
                yield str(value.target)


def calls_marked(model: Module, names: Sequence[str]) -> dict[str, Any]:
    """Let stages begin at single calls of modules, which names say as ``layer@2``, the third one.

    Returns:
        The other names, for torch to mark all calls of these.
    """
    at: dict[str, list[int]] = {}
    for name in names:
        if CALL.search(name):
            bare, _, number = name.rpartition("@")
            at.setdefault(bare, []).append(int(number))
    count: dict[str, int] = {}
    for name, numbers in at.items():
        _mark(model.get_submodule(name), name, numbers, count)
    if at:
        forward = model.forward

        def counted(*inputs: Any, **named: Any) -> Any:
            count.clear()
            return forward(*inputs, **named)

        model.forward = counted
    return dict.fromkeys(name for name in names if not CALL.search(name))


def _mark(module: Any, name: str, numbers: Collection[int], count: dict[str, int]) -> None:
    from torch.distributed.pipelining import pipe_split

    forward = module.forward

    def marked(*inputs: Any, **named: Any) -> Any:
        number = count[name] = count.get(name, -1) + 1
        if number in numbers:
            pipe_split()
        return forward(*inputs, **named)

    module.forward = marked


def called_often(cut: Module, names: Sequence[str]) -> str:
    """A sentence about names of modules that a model calls several times; empty if none is.

    Args:
        cut: what torch has exported and cut.
    """
    calls: dict[str, set[str]] = {}
    for stage in cut.children():
        for name, _ in stage.named_modules():
            calls.setdefault(CALL.sub("", name), set()).add(name)
    often = {name: len(calls.get(name, ())) for name in names if len(calls.get(name, ())) > 1}
    if not often:
        return ""
    each = ", ".join(f"{name!r} is called {n} times" for name, n in often.items())
    return f"; {each}: say which call begins a stage, as {next(iter(often)) + '@1'!r}, the second"
