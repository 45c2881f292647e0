"""Stages of a module that torch exported and cut: the edges between them, as `Pipeline` takes them.

torch writes the cut module as a graph of calls: a stage takes outputs of any stages before it, and
the module's input. Here the input comes to later stages through the first one, and results of
earlier stages leave through the last one.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Module

from linop.errors import ArgumentError
from linop.strategies.pipelines.exported_calls import check_buffers, merged
from linop.strategies.pipelines.stages.stateless import called

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

Port = tuple[int, int]
"""A stage, and the number of its output."""


class Stages(list[Module]):
    """Stages, and the edges between them.

    Attributes:
        edges: triples (a, b, k): stage b takes the k-th output of stage a.
        bound: dimensions whose lengths in the example are numbers in the graphs.
    """

    edges: list[tuple[int, int, int]]
    bound: Sequence[int] = ()


def stages_of(cut: Any, model: Module) -> Stages:
    """The stages of a `torch.distributed.pipelining.Pipe`, each of which takes its inputs by
    ascending edges.

    Args:
        model: the module that torch exported; the stages share its parameters.

    Raises:
        ArgumentError: a stage is empty or used out of order, or one after the first takes no
            tensor; or stages write to a buffer that they have in common.
    """
    calls = [node for node in cut.split_gm.graph.nodes if node.op == "call_module"]
    if [call.target for call in calls] != [f"submod_pp_{s}" for s in range(cut.num_stages)]:
        raise ArgumentError(
            "split: a stage would be empty, or used out of order; cut the module elsewhere"
        )
    graphs: list[GraphModule] = [cut.get_stage_module(s) for s in range(cut.num_stages)]
    own = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    for graph in graphs:
        merged(graph, {*own, *buffers})
    _share_parameters(graphs, own)
    check_buffers(graphs, buffers)
    ports = _ports(cut.split_gm.graph.nodes, calls)
    read = [node for call in calls[1:] for node in call.args] + _results(cut.split_gm)
    given = _placeholders(cut.split_gm)
    _take_inputs(graphs[0], given, [node for node in given if node in read], ports)
    taken: list[dict[Port, Node]] = [
        {ports[node]: own for node, own in zip(call.args, _placeholders(stage), strict=True)}
        for stage, call in zip(graphs, calls, strict=True)
        if call is not calls[0]
    ]
    # None and numbers, which the model returns beside tensors, are of no stage.
    results: list[Any] = [ports.get(one, one) for one in _results(cut.split_gm)]
    if results != [(len(graphs) - 1, k) for k in range(len(_results(graphs[-1])))]:
        _pass_results(graphs[-1], len(graphs) - 1, results, taken[-1])
    stages = Stages(graphs)
    stages.edges = []
    for b, (stage, inputs) in enumerate(zip(graphs[1:], taken, strict=True), 1):
        if not inputs:
            raise ArgumentError(
                f"split: stage {b} takes no tensor of those before it; cut elsewhere"
            )
        for port in sorted(inputs, reverse=True):
            first = next(iter(stage.graph.nodes))
            if first is not inputs[port]:
                first.prepend(inputs[port])
        stage.recompile()
        stages.edges += [(a, b, k) for a, k in sorted(inputs)]
    return stages


class ModalStage(torch.nn.Module):
    """A stage that computes otherwise in training than in evaluation: of exported graphs each is of
    one mode. It has the submodules, parameters and buffers of the first one.

    Args:
        graph: module of a mode, which it has at first.
        other: module of the other mode; or the error that this raises.
        trains: True if the first mode is that of training.
    """

    _made: tuple[Module, Module | ArgumentError, bool]

    def __init__(self, graph: Module, other: Module | ArgumentError, trains: bool) -> None:
        super().__init__()
        self.__dict__["_made"] = graph, other, trains  # no submodules: those are the first one's
        for name in _SHARED:
            self.__dict__[name] = getattr(graph, name)
        self.train(trains)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        graph, other, trains = self._made
        if self.training == trains:
            return graph(*inputs, **named)
        if isinstance(other, ArgumentError):
            raise ArgumentError(str(other))
        keys = _keys(other)  # of constants the graph has its own
        state = {key: value for key, value in _tensors(self) if key in keys}
        return called(other, state, inputs, named)

    def __reduce__(self) -> Any:
        kept = {k: v for k, v in self.__dict__.items() if k not in (*_SHARED, "_made")}
        return ModalStage, self._made, kept


def graph_of(stage: Module) -> GraphModule:
    """The graph's module that has the parameters of a stage."""
    graph: Any = stage._made[0] if isinstance(stage, ModalStage) else stage
    found: GraphModule = graph
    return found


_SHARED = "_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"


def in_both_modes(
    given: Stages | ArgumentError, other: Stages | ArgumentError, model: Module
) -> Stages:
    """Stages for training and evaluation, of those exported in the mode of the model and in the
    other one, or the reasons why there are none.

    Raises:
        ArgumentError: there are none in the mode of the model.
    """
    if isinstance(given, ArgumentError):
        raise given
    if isinstance(other, ArgumentError):
        return _in_one_mode(given, other, model.training)
    if _texts(given) == _texts(other):
        return given
    # In evaluation norms have fewer buffers.
    trains, tests = (given, other) if model.training else (other, given)
    own = {key for key, _ in _tensors(model)}
    pairs = zip(trains, tests, strict=True)
    more = sorted(key for one, two in pairs for key in (_keys(two) - _keys(one)) & own)
    if more or trains.edges != tests.edges:
        why = f"only evaluation uses {more}" if more else "other tensors cross the cuts"
        return _in_one_mode(given, ArgumentError(why), model.training)
    stages = [ModalStage(one, two, True) for one, two in zip(trains, tests, strict=True)]
    return _with_edges([stage.train(model.training) for stage in stages], given)


def _in_one_mode(stages: Stages, why: ArgumentError, trains: bool) -> Stages:
    """Stages that refuse the other mode."""
    mode, other = ("training", "evaluation") if trains else ("evaluation", "training")
    error = ArgumentError(
        f"its module was exported for {mode}, and cannot be for {other}: {why}; split it for "
        f"{other} alone, or pass a list of stages to the pipeline"
    )
    return _with_edges([ModalStage(stage, error, trains) for stage in stages], stages)


def _with_edges(modules: Sequence[Module], stages: Stages) -> Stages:
    found = Stages(modules)
    found.edges = stages.edges
    return found


def _texts(stages: Stages) -> Any:
    """Text of all graphs, and of the edges."""
    every = [m for stage in stages for m in stage.modules() if hasattr(m, "graph")]
    return [str(m.graph) for m in every], stages.edges


def _tensors(module: Module) -> list[tuple[str, Any]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _keys(module: Module) -> set[str]:
    return {key for key, _ in _tensors(module)}


def _share_parameters(stages: Sequence[GraphModule], own: dict[str, Any]) -> None:
    """Give the stages the model's parameters: torch copies those that it has under two names, and
    leaves them in stages that do not use them. Stages that compute with the same one share it."""
    for stage in stages:
        kinds = "call_module", "get_attr"
        used = tuple(f"{node.target}." for node in stage.graph.nodes if node.op in kinds)
        for key in [key for key, _ in stage.named_parameters(remove_duplicate=False)]:
            path, _, name = key.rpartition(".")
            owner = stage.get_submodule(path)
            if not f"{key}.".startswith(used):
                delattr(owner, name)
                continue
            setattr(owner, name, own[key])


def _ports(nodes: Sequence[Node], calls: Sequence[Node]) -> dict[Node, Port]:
    """The stage and the number of each output, by the node that stands for it."""
    ports = {call: (s, 0) for s, call in enumerate(calls)}
    for node in nodes:
        if node.op == "call_function" and node.target is operator.getitem:
            args: Any = node.args
            ports[node] = ports[args[0]][0], args[1]
    return ports


def _take_inputs(
    first: GraphModule, given: Sequence[Node], later: Sequence[Node], ports: dict[Node, Port]
) -> None:
    """Let the first stage take all inputs of the model, by their names and in their order, and make
    those that later stages take outputs of it, too."""
    own = {str(node.target): node for node in _placeholders(first)}
    before = next(iter(first.graph.nodes))
    for node in given:
        name = str(node.target)
        if name in own:
            before.prepend(own[name])
            before = own[name].next
        else:
            with first.graph.inserting_before(before):
                own[name] = first.graph.placeholder(name)
    passed: list[Node] = []
    for node in later:
        ports[node] = 0, len(_results(first)) + len(passed)
        passed.append(own[str(node.target)])
    _return(first, [*_results(first), *passed])


def _pass_results(
    last: GraphModule, number: int, results: Sequence[Any], taken: dict[Port, Node]
) -> None:
    """Let the last stage return all results of the model: ports, those of earlier stages too, and
    what else there is."""
    own = _results(last)
    for port in results:
        if isinstance(port, tuple) and port[0] != number and port not in taken:
            with last.graph.inserting_before():
                taken[port] = last.graph.placeholder(f"passed_{port[0]}_{port[1]}")

    def result(port: Any) -> Any:
        if not isinstance(port, tuple):
            return port
        return own[port[1]] if port[0] == number else taken[port]

    _return(last, [result(port) for port in results])


def _placeholders(module: GraphModule) -> list[Node]:
    return [node for node in module.graph.nodes if node.op == "placeholder"]


def _results(module: GraphModule) -> list[Node]:
    found: Any
    (found,) = (node.args[0] for node in module.graph.nodes if node.op == "output")
    return list(found) if isinstance(found, tuple | list) else [found]


def _return(module: GraphModule, results: Sequence[Node]) -> None:
    """Replace the results of a module."""
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    output.args = (tuple(results) if len(results) > 1 else results[0],)
    module.recompile()
