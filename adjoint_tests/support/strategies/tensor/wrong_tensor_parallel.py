"""Wrong plans and pairings of tensor-parallel modules: an error on every worker, and no hang."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from linop import REPLICATED
from linop.backends import use
from linop.backends.engine.base import Backend
from linop.errors import LinopError
from linop.layers import seeded
from linop.layers.agreement.input_agreement import agreement_of
from linop.strategies import (
    ColwiseParallel,
    CrossEntropyLoss,
    PrepareModuleOutput,
    RowwiseParallel,
    parallelize_module,
)
from support.strategies.tensor.tensor_networks import MLP, Case, LanguageModel, plan
from support.strategies.tensor.tensor_parallel import axis_of
from support.strategies.tensor.wrong_nets import CALLS, PAIRINGS, PLANS, chain

nn = torch.nn
Tensor = Any

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
