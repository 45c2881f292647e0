"""The oracle: the same steps in one process, by torch alone; and its comparison with a worker."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from support.models.cases import Case, loss, optimizer, part, seeded, start

State = dict[str, Any]


@dataclass(frozen=True)
class Twin:
    """Steps of one process.

    Attributes:
        losses: of each worker of the data axis, in each step: its term of the mean.
        unused: names of the parameters without gradient in the first step.
        parameters: after the last step.
        buffers: of each worker of the data axis, whose norms see its rows alone.
        keys: of the model's state.
        values: of all parameters in the beginning.
    """

    losses: Sequence[Sequence[float]]
    unused: frozenset[str]
    parameters: State
    buffers: Sequence[State]
    keys: tuple[str, ...]
    values: State


def alone(case: Case) -> Twin:
    """The twin of a case. Buffers are each worker's own; or, of data parallel workers, those of
    worker 0 at each forward, as they are in torch's DistributedDataParallel."""
    model = start(case)
    values = _copied(model.named_parameters())
    sgd = optimizer(case, model.parameters())
    own = [_copied(model.named_buffers()) for _ in range(case.replicas)]
    losses: list[list[float]] = [[] for _ in own]
    unused: frozenset[str] = frozenset()
    for step in range(case.steps):
        sgd.zero_grad()
        for of_step in losses:
            of_step.append(0.0)
        for micro in range(case.micro_batches):
            first = own[0]
            for replica in range(case.replicas):
                _put(model, first if _broadcast(case) else own[replica])
                losses[replica][-1] += _passed(case, model, step, replica, micro)
                own[replica] = _copied(model.named_buffers())
        if not step:
            unused = frozenset(n for n, p in model.named_parameters() if p.grad is None)
        sgd.step()
    keys = tuple(model.state_dict())
    return Twin(losses, unused, _copied(model.named_parameters()), own, keys, values)


def _broadcast(case: Case) -> bool:
    return case.trains and case.strategy.startswith(("data", "zero1"))


def _passed(case: Case, model: Any, step: int, replica: int, micro: int) -> float:
    """Forward and backward of a micro-batch; the loss."""
    rows = part(case, step, replica).rows(micro * case.rows, (micro + 1) * case.rows)
    if case.drops:
        seeded(case, step, replica)
    value = loss(case, step, model(*rows.arguments, **rows.options), rows.target)
    value.backward()
    return float(value.item())


def _copied(named: Iterable[tuple[str, Any]]) -> State:
    return {name: x.detach().clone() for name, x in named}


def _put(model: Any, buffers: State) -> None:
    with torch.no_grad():
        for name, x in model.named_buffers():
            x.copy_(buffers[name])


READ: dict[str, Callable[[Any, Any], Any]] = {
    "product": lambda p, shape: torch.ones(2, *shape).double() * p,
    "product with a row": lambda p, shape: p * torch.ones(shape[-1:]).double(),
    "sum": lambda p, shape: p.sum(),
    "mean": lambda p, shape: torch.mean(p.flatten()),
    "first row": lambda p, shape: p[:1] + 0,
    "concatenation": lambda p, shape: torch.cat([p, p]),
    "normalisation": lambda p, shape: p / p.norm(),
    "softmax": lambda p, shape: torch.softmax(p, 0),
}
"""Ways in which methods of users may read a parameter, which has this shape in one process."""


@dataclass
class Seen:
    """A worker's results, in the form of one process.

    Attributes:
        losses: its term of the mean in each step; empty on workers that have none.
        unused: names of its parameters without gradient in the first step.
        names: of all its parameters.
        state: of the whole model after the last step.
        keys: of the state that the parallel model itself gives; None: it refuses to.
        written: values of that state.
        read: value of a parameter that is read beside a forward, by name and way of `READ`; or
            the error that this raised.
        lost: why there is no state of the whole model.
    """

    losses: list[float]
    unused: set[str]
    names: set[str]
    state: State | None
    replica: int = 0
    keys: tuple[str, ...] | None = None
    written: State | None = None
    read: Mapping[tuple[str, str], Any] | None = None
    lost: str = ""


def faults(case: Case, twin: Twin, seen: Seen) -> list[str]:
    """Differences of a worker's results from the twin's, in words."""
    found = []
    if seen.names and (wrong := seen.names & twin.unused ^ seen.unused):
        found.append(f"gradients: None or not, otherwise than the twin's: {sorted(wrong)[:3]}")
    if not case.drops or case.options.get("seeded"):
        found += _losses(case, twin.losses[seen.replica], seen.losses)
        found += _state(case, twin, seen.state, twin.buffers[seen.replica], "state")
    found += _keys(twin, seen)
    if seen.lost:
        found.append(f"state: of no use, {seen.lost}")
    if seen.written is not None and seen.state is not None:
        own = {k: v for k, v in seen.written.items() if k in twin.parameters}
        wrong = [k for k, v in own.items() if not _near(case, v, seen.state[k])]
        if wrong:
            found.append(
                f"state_dict: {wrong[0]!r} has shape {tuple(own[wrong[0]].shape)}, not the value "
                f"of shape {tuple(seen.state[wrong[0]].shape)} that the model has"
            )
    for (name, way), value in (seen.read or {}).items():
        if isinstance(value, Exception):
            found.append(
                f"read: {way} of {name!r} beside a forward raised {type(value).__name__}: {value}"
            )
        elif not _near(case, value, wanted := READ[way](one := twin.values[name], one.shape)):
            found.append(
                f"read: {way} of {name!r} beside a forward has shape {tuple(value.shape)}, in one "
                f"process {tuple(wanted.shape)}"
            )
    return found


def _losses(case: Case, wanted: Sequence[float], found: Sequence[float]) -> list[str]:
    for step, (a, b) in enumerate(zip(wanted, found, strict=False)):
        if not abs(a - b) <= case.family.tolerance * max(1.0, abs(a)):
            return [f"loss of step {step}: {b:.9g}, the twin's {a:.9g}"]
    return []


def _state(case: Case, twin: Twin, state: State | None, buffers: State, what: str) -> list[str]:
    if state is None:
        return []
    wanted = {k: v for k, v in {**twin.parameters, **buffers}.items() if k in twin.keys}
    lost = [k for k in wanted if k not in state]
    if lost:
        return [f"{what}: without {lost[:3]}"]
    worst = {k: difference(v, state[k]) for k, v in wanted.items()}
    wrong = sorted((k for k in worst if not worst[k] <= case.family.tolerance), key=worst.get)  # type: ignore[arg-type]
    if not wrong:
        return []
    at = wrong[-1]
    return [
        f"{what} after {case.steps} steps: {len(wrong)} of {len(wanted)} differ, {at!r} by "
        f"{worst[at]:.2g}"
    ]


def _keys(twin: Twin, seen: Seen) -> list[str]:
    if seen.keys is None:
        return []
    wrong = [k for k in seen.keys if k not in twin.keys]
    lost = [k for k in twin.keys if k not in seen.keys]
    if not wrong and not lost:
        return []
    return [f"keys of state_dict: {wrong[:2]} are not the twin's, {lost[:2]} are missing"]


def _near(case: Case, a: Any, b: Any) -> bool:
    return difference(a, b) <= case.family.tolerance


def difference(a: Any, b: Any) -> float:
    """The largest, relative to the largest element; infinite for other shapes, or NaN."""
    if a.shape != b.shape:
        return float("inf")
    if not a.numel():
        return 0.0
    a, b = a.detach().double(), b.detach().double()
    found = ((a - b).abs().max() / max(1e-2, a.abs().max())).item()
    return found if found == found else float("inf")
