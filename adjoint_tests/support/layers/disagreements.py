"""Sequences of layers' calls, in some of which workers disagree: SPMD programs
``contract(backend, calls)`` for two workers or more. Needs torch.

After each disagreement all workers raise the same error, and the next call is right: nobody hangs,
nor is what one worker has begun taken for what others begin later.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

import linop
from linop import Partition, layers
from linop.backends import Backend
from linop.errors import ArgumentError, BackendError, DTypeError, LinopError, ShapeError
from linop.layers.agreement.input_agreement import agreement_of
from support.contracts.plans import mine, size

SLOW = 0.003
"""Seconds by which a worker is late in some calls, so that others are ahead."""


class Drawn(NamedTuple):
    """A call by all workers.

    Args:
        layer: index in `LAYERS`.
        what: key of `FITTING` or `ERRORS`.
        odd: the worker that does something else, modulo the number of workers.
        late: a worker that comes late, if there is one of that number.
    """

    layer: int
    what: str
    odd: int
    late: int


LAYERS = "AllReduce", "Repartition", "Broadcast", "SumReduce"
BLOCKS = 2
"""The layers before this index take a block of each worker, and give one to each."""
FITTING = (
    "the same",
    "longer on all",
    "longer on one",
    "no gradient on one",
    "a checkpoint on one",
    "a promise",
)
"""Calls that are right, whatever the others were."""
ERRORS: dict[str, type[LinopError]] = {
    "another dtype": DTypeError,
    "more dimensions": ShapeError,
    "nothing": ArgumentError,
    "a list": ArgumentError,
    "another mode": BackendError,
    "no gradients": BackendError,
    "another layer": BackendError,
    "a sum": BackendError,
}
"""Acts of one worker, to an error of all of this class."""


def made(n: int) -> list[Any]:
    every, first = Partition((n,)), Partition((1,))
    return [
        layers.AllReduce(every),
        layers.Repartition(every, every),
        layers.Broadcast(first, every),
        layers.SumReduce(every, first),
    ]


class Program:
    """The calls of one worker, and what they have to give.

    Args:
        n: number of workers; `me`: of this one.
    """

    def __init__(self, backend: Backend) -> None:
        self.n, self.me = size(backend), mine(backend)
        self.agreement = agreement_of(backend)
        self.layers = made(self.n)
        self.last: dict[str, Any] = {}
        """Lengths of the blocks of each layer's last call."""

    def run(self, calls: Sequence[Drawn]) -> None:
        for number, call in enumerate(calls):
            if call.late == self.me:
                time.sleep(SLOW)
            odd = call.odd % self.n
            if call.what in FITTING:
                self.right(call, number, odd)
            else:
                self.wrong(call, number, odd)

    def right(self, call: Drawn, number: int, odd: int) -> None:
        """A call whose result and gradient are right."""
        name, layer = LAYERS[call.layer], self.layers[call.layer]
        lengths = [3 + (call.what == "longer on all")] * self.n
        if call.what == "longer on one" and name == "Repartition":
            lengths[odd] += 2  # other workers pass what they passed before
        starts = [sum(lengths[:w]) for w in range(self.n)]
        holds = name != "Broadcast" or self.me == 0
        values = torch.arange(lengths[self.me]) + starts[self.me] + 1000.0 * number
        x = values if holds else torch.zeros(0)
        here = self.me == odd
        x.requires_grad_(not (here and call.what == "no gradient on one"))
        if call.what == "a checkpoint on one" and here:
            context = linop.autograd.checkpoint_context
            one = torch.ones((), requires_grad=True)  # so that backward computes again
            y = checkpoint(lambda v: layer(v) * one, x, use_reentrant=False, context_fn=context)
        else:
            promised = call.what == "a promise" and self.last.get(name) == lengths
            with layers.fixed_shapes() if promised else nullcontext():
                y = layer(x)
        self.last[name] = lengths if call.what in ("the same", "a promise") else None
        wanted, slope = self._expected(name, lengths, number)
        assert torch.equal(y.detach(), wanted), (call, y, wanted)
        (y * (1.0 + self.me if name != "Repartition" else y.detach())).sum().backward()
        if x.requires_grad:
            if name == "Repartition":
                slope = values.detach()
            expected = slope.expand_as(x) if holds else x
            assert torch.equal(x.grad, expected), (call, x.grad, expected)

    def _expected(self, name: str, lengths: list[int], number: int) -> tuple[Any, Any]:
        """This worker's result, and the gradient of its argument."""
        n, me = self.n, self.me
        total = sum(lengths)
        whole = torch.arange(total) + 1000.0 * number
        factors = torch.tensor(float(sum(range(1, n + 1))))
        if name == "Repartition":
            many, more = divmod(total, n)
            begin = me * many + min(me, more)
            return whole[begin : begin + many + (me < more)], None
        blocks = whole.split(lengths)
        if name == "Broadcast":
            return blocks[0], factors
        summed = torch.stack(blocks).sum(0)
        if name == "AllReduce":
            return summed, factors
        return summed if me == 0 else torch.zeros(lengths[0], 0), torch.tensor(1.0)

    def wrong(self, call: Drawn, number: int, odd: int) -> None:
        """A call of which all raise the same error."""
        which = call.layer % BLOCKS
        layer, other = self.layers[which], self.layers[1 - which]
        x: Any = torch.ones(3, requires_grad=True)
        what = call.what if self.me == odd else "the same"
        given: dict[str, Callable[[], Any]] = {
            "the same": lambda: layer(x),
            "another dtype": lambda: layer(x.double()),
            "more dimensions": lambda: layer(x[None]),
            "nothing": lambda: layer(None),
            "a list": lambda: layer([1.0]),
            "another mode": lambda: layer(x),
            "no gradients": lambda: layer(x),
            "another layer": lambda: other(x),
            "a sum": lambda: self.agreement.sum(1, "count something"),
        }
        layer.train(what != "another mode")
        text = ""
        try:
            with torch.set_grad_enabled(what != "no gradients"):
                given[what]()
        except LinopError as error:
            assert type(error) is ERRORS[call.what], (call, error)
            text = str(error)
        finally:
            layer.train()
        said = self.agreement.gather_objects(text, "compare errors")
        assert text and len({_without_layer(one) for one in said}) == 1, (call, said)


def _without_layer(text: str) -> str:
    """An error's text without the layer in which it was raised, which may be another one."""
    for name in LAYERS:
        text = text.removeprefix(f"{name}: ")
    return text


def disagreements_are_over(backend: Backend, calls: Sequence[Sequence[Any]]) -> None:
    """Any calls, one after the other."""
    Program(backend).run([Drawn(*call) for call in calls])


def a_change_of_one_is_known_to_all(backend: Backend) -> None:
    """To those that wait for no message of that worker, too: the root of a broadcast, and all where
    nothing has moved so far."""
    n, me = size(backend), mine(backend)
    layer = layers.Repartition(Partition((n,)), Partition((n,)))
    for _ in range(3):
        assert torch.equal(layer(torch.full((2,), float(me))), torch.full((2,), float(me)))
    # Balanced blocks stay; of the last one's n more elements each worker gets one.
    x = torch.full((2 + (n if me == n - 1 else 0),), float(me))
    if me == n - 1:
        time.sleep(0.05)
    y = layer(x)
    whole = torch.tensor([float(w) for w in range(n) for _ in range(2)] + n * [n - 1.0])
    assert torch.equal(y, whole[3 * me : 3 * me + 3]), y
    spread = layers.Broadcast(Partition((1,)), Partition((n,)))
    x = torch.ones(2) if me == 0 else torch.zeros(0)
    for _ in range(3):
        spread(x)
    if me == 1:
        time.sleep(0.05)
        spread.eval()
    try:
        spread(x)
    except BackendError as error:
        assert "training mode" in str(error), error
    else:
        raise AssertionError("the root went on")


def who_raises_alone_is_waited_for(backend: Backend) -> None:
    """A worker that has an error of its own between two calls, and goes on with the next: the
    others hear of that in the call that it has left out."""
    n, me = size(backend), mine(backend)
    first, second = made(n)[:2]
    x = torch.ones(3)
    for _ in range(2):
        second(first(x))
    if me != n - 1:
        text = _raised(lambda: first(x))
    else:
        text = _raised(lambda: second(x))
    assert "workers call different layers" in text, text
    assert torch.equal(first(x), torch.full((3,), float(n)))
    assert torch.equal(second(x), x)


def arguments_may_be_exchanged(backend: Backend) -> None:
    """By two workers, each of which then passes what the other one did."""
    n, me = size(backend), mine(backend)
    layer = layers.Repartition(Partition((n,)), Partition((n,)))
    for lengths in ([4, 2], [2, 4], [4, 2]):
        lengths += (n - 2) * [3]
        whole = torch.arange(3.0 * n)
        y = layer(whole.split(lengths)[me])
        assert torch.equal(y, whole[3 * me : 3 * me + 3]), (lengths, y)


def who_has_forgotten_a_call_asks_all(backend: Backend) -> None:
    """A worker with new arguments in every call forgets the first ones; the others, who have always
    passed nothing, of one of two shapes, still know that call."""
    n, me = size(backend), mine(backend)
    layer = layers.Repartition(Partition((1,), [n - 1]), Partition((1,)))

    def call(length: int, nothing: Any) -> None:
        y = layer(torch.full((length,), 1.5) if me == n - 1 else nothing)
        if me == 0:
            assert torch.equal(y, torch.full((length,), 1.5)), y

    call(1, torch.zeros(0))
    for length in range(2, 40):
        call(length, torch.zeros(1, 0))
    call(1, torch.zeros(0))


def _raised(call: Callable[[], Any]) -> str:
    try:
        call()
    except BackendError as error:
        return str(error)
    raise AssertionError("an error expected")


CONTRACTS = [
    a_change_of_one_is_known_to_all,
    who_raises_alone_is_waited_for,
    arguments_may_be_exchanged,
    who_has_forgotten_a_call_asks_all,
]
