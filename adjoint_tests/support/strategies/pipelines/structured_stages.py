"""Pipelines between whose stages any structures of tensors go, beside one process: contracts for
threads and ranks."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from linop.backends.engine.base import Backend
from linop.schedules import GENERATORS, Schedule
from linop.strategies import Pipeline
from support.strategies.pipelines.pipelines import RATE, equal, fill, squares, values

Tensor = Any
WIDTH, LENGTH = 4, 3


class State(NamedTuple):
    """Values between stages, in a class of its own."""

    hidden: Tensor
    rotary: tuple[Tensor, Tensor]
    mask: Tensor
    positions: Tensor | None
    scale: Tensor
    eps: float


@dataclass
class Record:
    """The same, with their names."""

    hidden: Tensor
    rotary: tuple[Tensor, Tensor]
    mask: Tensor
    positions: Tensor | None
    scale: Tensor
    eps: float


def dressed(form: str, state: State) -> Any:
    """Values in a structure."""
    if form == "tuple":
        return tuple(state)
    if form == "list":
        return list(state)
    if form == "dict":
        return OrderedDict(state._asdict())
    if form == "record":
        return Record(*state)
    return (state,) if form == "named tuple inside" else {"state": Record(*state)}


FORMS = "tuple", "list", "dict", "record", "named tuple inside", "record inside"


class Rotated(torch.nn.Module):  # type: ignore[misc]  # torch is not typed here
    """A stage of values with and without rows: hidden numbers, angles that a parameter scales, one
    for all rows, a mask, positions or None, a number without dimensions, and a constant.

    Args:
        form: of its result; None: the hidden numbers alone.
        first: it makes the values of the input, a mask, and perhaps of positions.
    """

    def __init__(self, seed: int, form: str | None, first: bool) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(WIDTH, WIDTH)
        self.angle = torch.nn.Parameter(torch.ones(1, LENGTH, 1))
        self.double()
        fill(self, seed)
        self.form, self.first = form, first

    def forward(self, *given: Any, **named: Any) -> Any:
        state = self._begun(*given, **named) if self.first else _state(given, named)
        cos, sin = state.rotary
        y = torch.tanh(self.inner(state.hidden)) * cos * self.angle + sin * state.scale
        if state.positions is not None:
            y = y + state.positions.unsqueeze(-1) * state.eps
        y = y.masked_fill(state.mask.unsqueeze(-1), 0.0)
        found = state._replace(hidden=y, scale=state.scale * 1.5)
        return y if self.form is None else dressed(self.form, found)

    def _begun(self, x: Tensor, mask: Tensor, positions: Tensor | None = None) -> State:
        turns = torch.arange(LENGTH, dtype=torch.float64).reshape(1, LENGTH, 1) * self.angle
        return State(x, (turns.cos(), turns.sin()), mask > 0, positions, self.angle.sum(), 0.25)


def _state(given: Sequence[Any], named: Mapping[str, Any]) -> State:
    if "state" in named:
        inside = named["state"]
        return State(**{name: getattr(inside, name) for name in State._fields})
    if named:
        return State(**named)
    return given[0] if len(given) == 1 else State(*given)


@dataclass(frozen=True)
class Chain:
    """Stages with such forms between them, and a schedule."""

    schedule: str
    forms: tuple[str, ...]
    micro_batches: int = 4
    chunks: int = 1
    positions: str = "shared"
    """Rows: of all, of "each" row, or "none"."""
    recompute: bool = False
    by_name: bool = True
    slots: int | None = None

    @property
    def table(self) -> Schedule:
        options: Any = {"chunks": self.chunks} if self.chunks > 1 else {}
        return GENERATORS[self.schedule](len(self.forms) + 1, self.micro_batches, **options)

    @property
    def workers(self) -> int:
        return len(self.table.workers)

    def model(self) -> list[Any]:
        forms = [*self.forms, None]
        return [Rotated(s, form, s == 0) for s, form in enumerate(forms)]

    def batch(self) -> tuple[dict[str, Any], Tensor]:
        rows = 2 * self.micro_batches + 1
        x, target = (values(rows, LENGTH, WIDTH, seed=k) for k in (1, 2))
        positions: Any = values(1, LENGTH, seed=3).mul(4).round().long()
        if self.positions == "each":
            positions = values(rows, LENGTH, seed=3).mul(4).round().long()
        mask = values(rows, LENGTH, seed=4).sub(0.5).gt(0).long()
        given = {"x": x, "mask": mask}
        if self.positions != "none":
            given["positions"] = positions
        return given, target


def output(stages: Sequence[Any], given: Mapping[str, Any], weights: Any = None) -> Tensor:
    """Output of one process: each stage is called with what the one before it returns."""
    result: Any = dict(given)
    for s, stage in enumerate(stages):
        positional: Sequence[Any] = ()
        named: dict[str, Any] = {}
        if isinstance(result, Mapping):
            named = dict(result)
        elif isinstance(result, Record):
            named = dict(vars(result))
        else:
            positional = tuple(result)
        if weights is None:
            result = stage(*positional, **named)
        else:
            result = torch.func.functional_call(stage, weights[s], tuple(positional), named)
    return result


def pieces(given: Mapping[str, Any], target: Tensor, sizes: Sequence[int]) -> Any:
    """Micro-batches of a batch."""
    parts = {k: x.split(list(sizes)) for k, x in given.items() if len(x) == len(target)}
    for m, wanted in enumerate(target.split(list(sizes))):
        yield {k: parts[k][m] if k in parts else x for k, x in given.items()}, wanted


def is_one_process(backend: Backend, chain: Chain) -> None:
    """Gradients of two steps, and outputs, bit for bit."""
    stages, alone = chain.model(), chain.model()
    options: Any = {"recompute": chain.recompute, "slots": chain.slots}
    pipe = Pipeline(stages, chain.table, squares, backend=backend, **options)
    given, target = chain.batch()
    sizes = [3, *[2] * (chain.micro_batches - 1)]
    for _ in range(2):
        if chain.by_name:
            pipe.step(given["x"], target, **{k: v for k, v in given.items() if k != "x"})
        else:
            pipe.step(tuple(given.values()), target)
        for one, wanted in pieces(given, target, sizes):
            squares(output(alone, one), wanted).backward()
        for s, stage in pipe.stages.items():
            for p, q in zip(stage.parameters(), alone[s].parameters(), strict=True):
                equal(f"gradient in stage {s}", p.grad, q.grad)
    y = pipe(given)
    if y is not None:
        with torch.no_grad():
            each = [output(alone, one) for one, _ in pieces(given, target, sizes)]
        equal("output", y, torch.cat(each))


def is_delayed(backend: Backend, chain: Chain) -> None:
    """PipeDream is its formula, bit for bit: gradients at older versions."""
    stages, alone = chain.model(), chain.model()
    sgd = partial(torch.optim.SGD, lr=RATE)
    pipe = Pipeline(
        stages, chain.table, squares, optimizer=sgd, recompute=chain.recompute, backend=backend
    )
    given, target = chain.batch()
    pipe.step(given, target)
    versions = [[{n: w.detach() for n, w in stage.named_parameters()}] for stage in alone]
    sizes = [3, *[2] * (chain.micro_batches - 1)]
    for m, (one, wanted) in enumerate(pieces(given, target, sizes)):
        late = [max(0, m - len(alone) + 1 + s) for s in range(len(alone))]
        read = [
            {n: w.clone().requires_grad_() for n, w in versions[s][k].items()}
            for s, k in enumerate(late)
        ]
        squares(output(alone, one, read), wanted).backward()
        for own, leaves in zip(versions, read, strict=True):
            own.append({n: w - RATE * leaves[n].grad for n, w in own[-1].items()})
    for s, stage in pipe.stages.items():
        for name, p in stage.named_parameters():
            error = (p - versions[s][-1][name]).abs().max()
            assert error < 1e-13, f"{name} of stage {s}: {error}"


class Encoder(torch.nn.Module):  # type: ignore[misc]
    """It returns a memory, a mask of it, and what the decoder begins with."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.words = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Embedding(5, WIDTH)
        fill(self.double(), 1)

    def forward(self, x: Tensor, words: Tensor, mask: Tensor) -> dict[str, Tensor]:
        memory = torch.tanh(self.inner(x))
        return {"memory": memory, "mask": mask > 0, "hidden": self.words(words), "unused": x * 2}


class Decoder(torch.nn.Module):  # type: ignore[misc]
    """A block that attends to the memory."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.query, self.key = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(2))
        fill(self.double(), seed)

    def forward(self, hidden: Tensor, memory: Tensor, mask: Tensor | None = None) -> Tensor:
        weights = self.query(hidden) @ self.key(memory).mT
        if mask is not None:
            weights = weights.masked_fill(mask.unsqueeze(1), -1e9)
        return hidden + torch.softmax(weights, -1) @ memory


EDGES = [
    *((0, 1, "hidden"), (1, 2), (2, 3)),  # the hidden numbers from each to the next
    *((0, s, "memory") for s in (1, 2, 3)),  # the memory from the encoder to each
    *((0, s, "mask") for s in (1, 3)),
]


def is_encoder_decoder(backend: Backend, schedule: str, chunks: int) -> None:
    """Blocks of a decoder take the encoder's output by name, and its gradients are added."""
    stages = [Encoder(), *(Decoder(s) for s in (2, 3, 4))]
    alone = copy.deepcopy(stages)
    options: Any = {"chunks": chunks} if chunks > 1 else {}
    table = GENERATORS[schedule](4, 4, **options)
    pipe = Pipeline(stages, table, squares, edges=EDGES, backend=backend)
    x, target = values(9, 6, WIDTH, seed=5), values(9, LENGTH, WIDTH, seed=6)
    words = values(9, LENGTH, seed=7).mul(3).long().remainder(5)
    mask = values(9, 6, seed=8).gt(0.8)
    for _ in range(2):
        pipe.step(x, target, words=words, mask=mask)
        given = {"x": x, "words": words, "mask": mask}
        for one, wanted in pieces(given, target, [3, 2, 2, 2]):
            found = alone[0](**one)
            y = alone[1](found["hidden"], found["memory"], found["mask"])
            y = alone[3](alone[2](y, found["memory"]), found["memory"], found["mask"])
            squares(y, wanted).backward()
    for s, stage in pipe.stages.items():
        for p, q in zip(stage.parameters(), alone[s].parameters(), strict=True):
            error = (p.grad - q.grad).abs().max() / q.grad.abs().max()
            assert error < 1e-13, f"gradient in stage {s}: {error}"
