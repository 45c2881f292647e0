"""Nets, and plans for them, that do not fit together, each with the words of the error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from linop import COPIES, REPLICATED
from linop.strategies import (
    AttentionParallel,
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)
from support.strategies.tensor.tensor_networks import MLP, Attention, Case, LanguageModel

nn = torch.nn
Tensor = Any


def chain(**modules: Any) -> Any:
    net = nn.Sequential()
    for name, module in modules.items():
        net.add_module(name, module)
    return net


class Residual(nn.Module):  # type: ignore[misc]  # torch is not typed here
    """A function of two modules' outputs."""

    def __init__(self, function: Callable[..., Tensor], *modules: Any) -> None:
        super().__init__()
        self.function = function
        self.one, self.two, *rest = modules
        if rest:
            (self.three,) = rest

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


class Scaled(nn.Module):  # type: ignore[misc]
    """A norm of the heads' queries (QK-norm)."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.norm, self.o = nn.Linear(4, 8), nn.LayerNorm(2), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.norm(self.q(x).unflatten(-1, (-1, 2))).flatten(-2))


def _linears(n: int = 2) -> list[Any]:
    return [nn.Linear(4, 4) for _ in range(n)]


def _mixed(net: Any, x: Tensor) -> Tensor:
    return net.one(x) + net.two(x)


def _in_turn(net: Any, x: Tensor) -> Tensor:
    return net.two(torch.relu(net.one(x)))


def _summed(net: Any, x: Tensor) -> Tensor:
    y = net.one(x)
    return net.two(y.reshape(y.shape))


def _offset(net: Any, x: Tensor) -> Tensor:
    """With a part of a parameter, as learned positions."""
    return net.two(net.one(x)) + net.one.bias[:4]


LOOSE = nn.Parameter(torch.ones(4))


def _with_a_loose_parameter(net: Any, x: Tensor) -> Tensor:
    return net.one(x) * LOOSE


def _again_transposed(net: Any, x: Tensor) -> Tensor:
    """With a weight of another module, as words that are tied by hand."""
    return net.two(net.one(x)) @ net.one.weight.T


class ByName(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.inside = Residual(lambda net, x: net.one(x), *_linears())

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x=x)


PAIRINGS: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "column after column": (
        lambda: chain(a=nn.Linear(4, 4), relu=nn.ReLU(), b=nn.Linear(4, 4)),
        {"a": ColwiseParallel(), "b": ColwiseParallel()},
        "b: an input whole on all workers (REPLICATED) expected; that of relu is split along "
        "dimension -1",
    ),
    "column before a plain module": (
        lambda: chain(a=nn.Linear(4, 4), b=nn.Linear(4, 4)),
        {"a": ColwiseParallel()},
        "b (Linear): an input whole on all workers (REPLICATED) expected; that of a is split",
    ),
    "copies as whole": (
        lambda: chain(inside=chain(a=nn.Linear(4, 4))),
        {"inside": PrepareModuleInput(REPLICATED, COPIES), "inside.a": ColwiseParallel()},
        "inside.a: an input whole on all workers (REPLICATED) expected; that of PrepareModuleInput "
        "of inside is a copy on each (COPIES)",
    ),
    "row without column": (
        lambda: chain(a=nn.Linear(4, 4)),
        {"a": RowwiseParallel()},
        "a: an input split along dimension -1 expected; that of the input is whole",
    ),
    "plain norm on a split sequence": (
        lambda: chain(a=nn.Linear(4, 4), b=nn.Linear(4, 4), norm=nn.LayerNorm(4)),
        {"a": ColwiseParallel(), "b": RowwiseParallel(output_layouts=1)},
        "norm (LayerNorm): an input whole on all workers (REPLICATED) expected; that of b is split "
        "along dimension 1. Name the module in the plan",
    ),
    "norm of a whole sequence": (
        lambda: chain(norm=nn.LayerNorm(4)),
        {"norm": SequenceParallel()},
        "norm: an input split along dimension 1 expected; that of the input is whole",
    ),
}
"""Of modules in a Sequential, found before anything runs: the net, the plan, the error."""

CALLS: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "column after column": (
        lambda: Residual(_in_turn, *_linears()),
        {"*": ColwiseParallel()},
        "Residual.two (ColwiseLinear): an input whole on all workers (REPLICATED) expected; this "
        "one is split along dimension -1",
    ),
    "reshaped": (
        lambda: Residual(_summed, *_linears()),
        {"*": ColwiseParallel()},
        "Residual.two (ColwiseLinear): an input whole on all workers (REPLICATED) expected; this "
        "one is split along dimension -1",
    ),
    "plain module": (
        lambda: Residual(_in_turn, *_linears()),
        {"one": ColwiseParallel(output_layouts=1)},
        "Residual.two (Linear): linear of a parameter of shape (4, 4) and a tensor that is split "
        "along dimension -2: its gradient would be of this worker's part alone",
    ),
    "whole and split": (
        lambda: Residual(_mixed, *_linears()),
        {"one": ColwiseParallel()},
        "Residual: add of tensors that are whole on all workers (REPLICATED) and split",
    ),
    "two ways to split": (
        lambda: Residual(_mixed, *_linears()),
        {"one": ColwiseParallel(), "two": ColwiseParallel(output_layouts=1)},
        "add of tensors that are split along dimension -1 and split along dimension -2",
    ),
    "norm of heads": (
        Scaled,
        {"q": ColwiseParallel(heads=4), "o": RowwiseParallel(heads=4)},
        "Scaled.norm (LayerNorm): layer_norm of a parameter of shape (2,) and a tensor that is "
        "split along dimension -2: its gradient would be of this worker's part alone",
    ),
    "part of a parameter": (
        lambda: Residual(_offset, *_linears()),
        {"two": ColwiseParallel()},
        "Residual: add of tensors that are whole on all workers (REPLICATED) and split along",
    ),
    "parameter that is in no module": (
        lambda: Residual(_with_a_loose_parameter, *_linears()),
        {"one": ColwiseParallel()},
        "Residual: mul of a parameter of shape (4,) and a tensor that is split along dimension -1",
    ),
    "weight that is cut": (
        lambda: Residual(_again_transposed, *_linears()),
        {"one": ColwiseParallel(), "two": RowwiseParallel()},
        "Residual: matmul of tensors that are whole on all workers (REPLICATED) and split along",
    ),
    "inputs by name": (
        ByName,
        {"inside": PrepareModuleInput(REPLICATED, COPIES), "inside.one": ColwiseParallel(COPIES)},
        "PrepareModuleInput: Residual called with 0 positional inputs; 1 are converted: pass those",
    ),
    "copies as whole": (
        lambda: chain(inside=Residual(lambda net, x: net.one(x), *_linears())),
        {"inside": PrepareModuleInput(REPLICATED, COPIES), "inside.one": ColwiseParallel()},
        "an input whole on all workers (REPLICATED) expected; this one is a copy on each (COPIES)",
    ),
    "copies of what is split": (
        lambda: chain(inside=chain(a=nn.Linear(4, 4))),
        {"inside": PrepareModuleInput(1, COPIES), "inside.a": ColwiseParallel(COPIES)},
        "an input split along dimension 1 expected; this one is whole on all workers",
    ),
    "other features": (
        lambda: chain(a=nn.Linear(5, 4)),
        {"a": ColwiseParallel()},
        "a (ColwiseLinear): an input of global shape (2, 3, 4); (…, 5) expected",
    ),
    "normalised and split": (
        lambda: chain(norm=nn.LayerNorm(4)),
        {"norm": SequenceParallel(-1, REPLICATED, REPLICATED)},
        "norm (SequenceNorm): dimension 2 of a tensor of shape (2, 3, 4) is to be split",
    ),
}
"""Of other modules, found at their first call, before a message of the module."""


def _sharing() -> Any:
    return LanguageModel(Case())


def _hooked(register: Callable[[Any, Callable[..., None]], Any]) -> Any:
    net = chain(a=nn.Linear(4, 4))
    register(net.a, lambda *given: None)
    return net


def _max_norm() -> Any:
    return chain(a=nn.Embedding(4, 4, max_norm=1.0))


PLANS: dict[str, tuple[Callable[[], Any], Any, str]] = {
    "no submodule": (
        lambda: MLP(4, 4),
        {"middle": ColwiseParallel()},
        "there is no submodule 'middle'; there are up, down",
    ),
    "empty": (lambda: MLP(4, 4), {}, "plan: styles of submodules expected, given none; there are "),
    "no style": (lambda: MLP(4, 4), {"up": 1}, "'up': 1 given; ColwiseParallel(), "),
    "fewer heads than workers": (
        lambda: Attention(4, 2, 1),
        {"k": ColwiseParallel(heads=1)},
        "'k' has 1 heads for 2 workers of 'tp'; one each at least expected",
    ),
    "queries that do not divide": (
        lambda: Attention(4, 3, 1),
        {"k": ColwiseParallel(heads=1, queries=3)},
        "'k': 3 heads of queries in 1 groups for 2 workers of 'tp'; as many workers for each group",
    ),
    "groups that do not divide beside queries cut by heads": (
        lambda: Attention(24, 12, 3),  # worker 0 would have heads of half the second group
        {"q": ColwiseParallel(heads=12), "k": ColwiseParallel(heads=3, queries=12)},
        "'k': 12 heads of queries in 3 groups for 2 workers of 'tp'; as many workers for each group"
        ", or groups for each worker, and as many heads of queries for each of them expected; or "
        "heads=3 of all, without queries=",
    ),
    "groups beside queries cut by heads": (
        lambda: Attention(24, 12, 3),
        {"q": ColwiseParallel(heads=12), "k": ColwiseParallel(heads=3)},
        "for each of them expected; or heads=3 of all; or queries=3, if they are for no others",
    ),
    "shared groups laid out": (
        lambda: Attention(4, 2, 1),
        {"k": ColwiseParallel(output_layouts=REPLICATED, heads=1, queries=2)},
        "'k' has fewer heads than workers; a torch.nn.Linear with output_layouts=-1 expected",
    ),
    "heads that do not divide features": (
        lambda: MLP(4, 6),
        {"up": ColwiseParallel(heads=4)},
        "'up' has 6 features, and heads=4",
    ),
    "torch's attention": (
        lambda: chain(a=nn.MultiheadAttention(4, 2)),
        {"a": ColwiseParallel()},
        "'a' is a MultiheadAttention; ColwiseParallel is for torch.nn.Linear and "
        "torch.nn.Embedding. Its projections are in one tensor: AttentionParallel() is for it",
    ),
    "norm cut by columns": (
        lambda: chain(a=nn.LayerNorm(4)),
        {"a": ColwiseParallel()},
        "'a' is a LayerNorm; ColwiseParallel is for",
    ),
    "cut along any dimension": (
        lambda: chain(a=nn.Linear(4, 4)),
        {"a": SequenceParallel(None, REPLICATED)},
        "'a': sequence_dim=None, and input_layouts= or output_layouts=",
    ),
    "attention as another": (
        lambda: chain(a=nn.Linear(4, 4)),
        {"a": AttentionParallel()},
        "'a' is a Linear; AttentionParallel is for torch.nn.MultiheadAttention",
    ),
    "parts of other lengths": (
        lambda: chain(a=nn.Linear(4, 10)),
        {"a": ColwiseParallel(packed=3)},
        "'a' has 10 features, and packed=3: the number of equal parts",
    ),
    "parts in another layout": (
        lambda: chain(a=nn.Linear(4, 12)),
        {"a": ColwiseParallel(packed=3, output_layouts=REPLICATED)},
        "'a': packed= with output_layouts= or queries=",
    ),
    "names of inputs": (
        lambda: chain(a=nn.Linear(4, 4)),
        {"a": PrepareModuleInput(input_kwarg_layouts={"x": 1})},
        "'a': input_kwarg_layouts of x, and desired_input_kwarg_layouts of nothing",
    ),
    "tied, one in the plan": (
        _sharing,
        {"words": RowwiseParallel()},
        "'words.weight' and 'head.weight' are one parameter, and would be cut in different ways",
    ),
    "tied, cut in two ways": (
        _sharing,
        {"words": ColwiseParallel(), "head": ColwiseParallel()},
        "'words.weight' and 'head.weight' are one parameter, and would be cut in different ways",
    ),
    "max_norm": (_max_norm, {"a": RowwiseParallel()}, "Embedding: max_norm= is not supported"),
    "no layout": (
        lambda: MLP(4, 4),
        {"up": ColwiseParallel("rows")},
        "input_layouts='rows': linop.REPLICATED, linop.COPIES or the dimension",
    ),
    "copies as output": (
        lambda: MLP(4, 4),
        {"down": RowwiseParallel(output_layouts=COPIES)},
        "output_layouts=COPIES: a module's output is one tensor",
    ),
    "hooks": (
        lambda: _hooked(nn.Linear.register_forward_hook),
        {"a": ColwiseParallel()},
        "'a' has hooks, or a parameter of it has; its replacement would not have them",
    ),
    "hooks of a parameter": (
        lambda: _hooked(lambda linear, hook: linear.weight.register_hook(hook)),
        {"a": RowwiseParallel()},
        "'a' has hooks, or a parameter of it has; its replacement would not have them",
    ),
    "heads in words": (
        lambda: MLP(4, 4),
        {"up": ColwiseParallel(heads="two")},  # type: ignore[arg-type]
        "'up': heads: expected a whole number, given 'two'",
    ),
    "no plan": (lambda: MLP(4, 4), None, "plan: a style, or styles by name, expected; given None"),
    "no name": (lambda: MLP(4, 4), {0: ColwiseParallel()}, "plan: name of a submodule: expected"),
    "no module": (lambda: 4, {"": ColwiseParallel()}, "module: expected a Module, given 4"),
    "numbers of layouts": (
        lambda: MLP(4, 4),
        {"up": PrepareModuleInput([REPLICATED, 1], COPIES)},
        "'up': 2 input_layouts and 1 desired_input_layouts",
    ),
}
"""Wrong by themselves: the net, the plan, the error."""
