"""Wrong plans and pairings of tensor-parallel modules: an error on every worker, and no hang."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from linop import COPIES, REPLICATED
from linop.backends import use
from linop.backends.engine.base import Backend
from linop.errors import LinopError
from linop.layers import seeded
from linop.layers.agreement.input_agreement import agreement_of
from linop.strategies import (
    ColwiseParallel,
    CrossEntropyLoss,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from support.strategies.tensor.tensor_networks import MLP, Attention, Case, LanguageModel, plan
from support.strategies.tensor.tensor_parallel import axis_of

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
        lambda: chain(inside=chain(a=nn.Linear(4, 4))),
        {"inside": PrepareModuleInput(REPLICATED, COPIES), "inside.a": ColwiseParallel()},
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
        "torch.nn.Embedding. Its projections are in one tensor",
    ),
    "norm cut by columns": (
        lambda: chain(a=nn.LayerNorm(4)),
        {"a": ColwiseParallel()},
        "'a' is a LayerNorm; ColwiseParallel is for",
    ),
    "linear as a norm": (
        lambda: chain(a=nn.Linear(4, 4)),
        {"a": SequenceParallel()},
        "'a' is a Linear; SequenceParallel is for torch.nn.LayerNorm, torch.nn.RMSNorm",
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
OUTPUT = {"": PrepareModuleOutput(-1, REPLICATED), "a": ColwiseParallel()}
"""A plan that is right."""


def refuses(backend: Backend, what: str, name: str) -> None:
    """An error with these words, on every worker; then another net runs."""
    make, given, words = {"pairing": PAIRINGS, "call": CALLS, "plan": PLANS}[what][name]
    axis = axis_of(backend)
    torch.manual_seed(0)
    example = torch.ones(2, 3, 4, requires_grad=True) if what == "call" else None
    with _one_net(backend):
        net = make()
    before = _parts(net)
    _raises(words, lambda: parallelize_module(net, axis, given, example=example))
    assert _parts(net) == before  # all or nothing
    if what == "call":
        with _one_net(backend):
            net = make()
        net = parallelize_module(net, axis, given)
        for _ in range(2):
            _raises(words, lambda: net(example))
    with _one_net(backend):
        net = chain(a=nn.Linear(4, 4))
    parallelize_module(net, axis, OUTPUT)(torch.ones(2, 4)).sum().backward()


def _parts(net: Any) -> Any:
    """The modules of a net, with their parameters, and their numbers of hooks."""
    return [
        (
            name,
            id(one),
            [*map(id, one.parameters())],
            {key: len(x) for key, x in vars(one).items() if key.endswith("_hooks")},
            sorted(vars(one)),
        )
        for name, one in (net.named_modules() if isinstance(net, nn.Module) else ())
    ]


def refuses_alone(backend: Backend) -> None:
    """A plan, module or argument that is wrong on the last worker alone: one error for all."""
    axis = axis_of(backend)
    last = axis.index == axis.size - 1
    good = (lambda: chain(a=nn.Linear(4, 4))), OUTPUT
    x = torch.ones(2, 4)
    frozen = (lambda: good[0]().requires_grad_(False)), OUTPUT
    evaluated = (lambda: good[0]().eval()), OUTPUT
    other = (lambda: chain(a=nn.Linear(4, 4), b=nn.Tanh())), OUTPUT
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        *((table[:2], {}, f"on worker {axis.size - 1}: ") for table in PLANS.values()),
        (good, {"inputs": "x"}, f"on worker {axis.size - 1}: inputs='x'"),
        (good, {"inputs": 1}, "have another argument at 'inputs': REPLICATED and 1"),
        (good, {"example": x}, "have another argument at 'example': None and 2-dimensional"),
        (frozen, {}, "have another module at 'a.weight': ((4, 4), 'torch.float32', 'trained')"),
        (evaluated, {}, "have another module at 'the module itself': Sequential() in training and"),
        (other, {}, "have another module at 'b': nothing and Tanh() in training"),
    ]
    agreement = agreement_of(axis.backend)
    for (make, given), options, words in wrong:
        with _one_net(backend):
            net = (make if last else good[0])()
        try:
            parallelize_module(net, axis, given if last else OUTPUT, **(options if last else {}))
            said = "no error"
        except LinopError as error:
            said = f"{type(error).__name__}: {error}"
        assert agreement.gather_objects(said) == [said] * axis.size
        assert words in said or "have another " in said, (words, said)
    _raises(
        f"on worker {axis.size - 1}: reduction='all'",
        lambda: CrossEntropyLoss(axis, reduction="all" if last else "sum"),
    )
    _raises(
        f"constructed with ignore_index=-100 on worker 0 and ignore_index=1 on worker "
        f"{axis.size - 1}",
        lambda: CrossEntropyLoss(axis, ignore_index=1 if last else -100),
    )


def refuses_a_second_time(backend: Backend) -> None:
    axis = axis_of(backend)
    with _one_net(backend):
        net = MLP(4, 4)
    given = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(net, axis, given)
    words = "'up' is parallel already (ColwiseLinear); parallelise the sequential module once"
    _raises(words, lambda: parallelize_module(net, axis, given))


def refuses_other_nets(backend: Backend) -> None:
    """Values, plans and shapes that differ between workers."""
    axis, me = axis_of(backend), backend.worker or 0
    with _one_net(backend):
        net = MLP(4, 4)
    with torch.no_grad():
        net.down.bias[0] += me
    given: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    _raises(
        "workers 0 and 1 of 'tp' have another module at 'down.bias': ",
        lambda: parallelize_module(net, axis, given),
    )
    with _one_net(backend):
        net = MLP(4, 4)
    given["up"] = ColwiseParallel(heads=2 + 2 * me)
    _raises(
        "workers 0 and 1 of 'tp' have another plan at 'up': ",
        lambda: parallelize_module(net, axis, given),
    )
    given["up"] = ColwiseParallel()
    parallelize_module(net, axis, given)
    _raises("do not make up one tensor", lambda: net(torch.ones(2 + me, 4)))
    net(torch.ones(2, 4)).sum().backward()


def refuses_changed_norms(backend: Backend) -> None:
    """In debug mode: a replicated parameter, or an input, that is another on one worker."""
    axis, me = axis_of(backend), backend.worker or 0
    case = Case(sequence=True)
    with _one_net(backend):
        net = LanguageModel(case)
    net = parallelize_module(net, axis, plan(case))
    text = torch.zeros(2, 4, dtype=torch.int64)
    net(text)
    with torch.no_grad():
        net.norm.weight[0] += me
    _raises("norm (SequenceNorm): parameter 'weight'", lambda: net(text))
    with torch.no_grad():
        net.norm.weight[0] -= me
    net(text)
    text[0, 0] += me
    _raises("words (ParallelEmbedding): input 0", lambda: net(text))


def refuses_indices(backend: Backend) -> None:
    """Words and classes that are not there."""
    axis = axis_of(backend)
    with _one_net(backend):
        net = LanguageModel(Case())
    net = parallelize_module(net, axis, plan(Case()))
    for word in (-1, 11):
        text = torch.full((2, 3), word)
        _raises(f"indices from {word} to {word}; there are 11", lambda x=text: net(x))
    logits = torch.ones(2, 3)
    words = f"targets from 0 to {3 * axis.size - 1}, or ignore_index=-100, expected"
    target = torch.tensor([0, 3 * axis.size])
    _raises(words, lambda: CrossEntropyLoss(axis)(logits, target))
    _raises("a target of shape (3,); (2,)", lambda: CrossEntropyLoss(axis)(logits, target[[0] * 3]))
    _raises("a target of float32; int64", lambda: CrossEntropyLoss(axis)(logits, target.float()))
    _raises("reduction='all'", lambda: CrossEntropyLoss(axis, reduction="all"))


class _Hooked(torch.nn.Module):  # type: ignore[misc]  # torch is not typed here
    """Gradients on their way are divided by their norm: of what is between the layers, or of the
    result."""

    def __init__(self, between: bool) -> None:
        super().__init__()
        self.up, self.down, self.between = torch.nn.Linear(4, 6), torch.nn.Linear(6, 4), between

    def forward(self, x: Any) -> Any:
        h = torch.relu(self.up(x))
        y = self.down(h)
        (h if self.between else y).register_hook(lambda g: g / g.norm())
        return y


def refuses_hooks(backend: Backend) -> None:
    """On the gradients of tensors that are split, every time; those of whole ones are right."""
    axis = axis_of(backend)
    styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    x = torch.arange(8.0).reshape(2, 4)
    with _one_net(backend):
        nets, twin = [_Hooked(between) for between in (True, False)], _Hooked(False)
    twin.load_state_dict(nets[1].state_dict())
    split, whole = (parallelize_module(net, axis, styles) for net in nets)
    for _ in range(2):
        _raises("register_hook is not known to compute block by block", lambda: split(x))
    for net in (whole, twin):
        net(x).square().sum().backward()
    wanted = twin.up.bias.grad[whole.up.spaces["bias"].slices(axis.index)]
    assert torch.allclose(whole.up.bias.grad, wanted, rtol=1e-5), (whole.up.bias.grad, wanted)


def _raises(words: str, call: Callable[[], Any]) -> None:
    try:
        call()
    except LinopError as error:
        assert re.search(re.escape(words), str(error)), str(error)
    else:
        raise AssertionError(f"no error: {words}")


@contextmanager
def _one_net(backend: Backend) -> Iterator[None]:
    """Context in which all workers draw the same values."""
    with use(backend), seeded(0):
        yield
