"""The keys of a call's draws, in their order, and those of what is computed again.

Every draw of a call has a key: made of one seed for the call, the same on all workers, and of the
draw's number in it. What is computed again in backward, under `torch.utils.checkpoint` or
`linop.autograd.checkpoint_context`, draws with the keys of the first time.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch.overrides import TorchFunctionMode

from linop.backends.autograd.recompute import carriers
from linop.errors import PartitionError
from linop.layers.parameters.generator import seed_of

_CHECKPOINT = torch.utils.checkpoint.__file__
_RECORD = "_linop_draws"
"""Attribute of torch's objects of a checkpoint: the draws in it."""
_CURE = (
    "a draw in torch.utils.checkpoint that cannot be repeated in backward; give it "
    "context_fn=linop.autograd.checkpoint_context"
)


class Draw(NamedTuple):
    """One draw: the function, the shape of this worker's block, its layout, its key."""

    name: str
    shape: tuple[int, ...]
    layout: Any
    key: int


@dataclass
class Recorded:
    """The draws of a computation that may be repeated."""

    draws: list[Draw]
    records: list[Any]

    def close(self) -> None:
        """Record no more."""
        self.records[:] = [one for one in self.records if one is not self]

    def again(self) -> Repeated:
        """Context in which the same draws are made."""
        return Repeated(self)


class Draws:
    """Draws that follow each other."""

    def __init__(self) -> None:
        self.records: list[Recorded] = []
        """Of the contexts of linop that are open."""

    def take(self, name: str, shape: tuple[int, ...], layout: Any) -> Draw:
        """The next draw."""
        records = [*self.records, *self._in_checkpoints()]
        draw = self.next(name, shape, layout)
        for record in {id(one): one for one in records}.values():
            record.draws.append(draw)
        return draw

    def next(self, name: str, shape: tuple[int, ...], layout: Any) -> Draw:
        raise NotImplementedError

    def _in_checkpoints(self) -> Iterator[Recorded]:
        """The records of torch's checkpoints that this computation is in, the innermost first."""
        frame = inspect.currentframe()
        while frame is not None:
            code = frame.f_code
            if code.co_filename == _CHECKPOINT:
                if code.co_name == "recompute_fn" or code.co_name == "backward":
                    return
                owner = _owner(code.co_name, frame.f_locals)
                if owner is not None:
                    yield self._record_of(*owner)
            frame = frame.f_back

    def _record_of(self, owner: Any, attribute: str) -> Recorded:
        found = getattr(owner, _RECORD, None)
        if found is None:
            found = Recorded([], [])
            setattr(owner, _RECORD, found)
            setattr(owner, attribute, _Repeatable(getattr(owner, attribute), found))
        return found


class _Repeatable:
    """A function that is called again, with the same draws."""

    def __init__(self, function: Callable[..., Any], record: Recorded) -> None:
        self._function, self._record = function, record

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._record.again():
            return self._function(*args, **kwargs)


def _owner(name: str, variables: dict[str, Any]) -> tuple[Any, str] | None:
    """The object of a checkpoint that calls a function again, and its attribute that is that
    function; None for a frame of another function.

    Raises:
        PartitionError: it has none, in this version of torch.
    """
    if name == "forward" and "ctx" in variables:
        owner, attribute = variables["ctx"], "run_function"
    elif name == "checkpoint" and "gen" in variables:
        suspended = getattr(variables["gen"], "gi_frame", None)
        owner = None if suspended is None else suspended.f_locals.get("new_frame")
        attribute = "recompute_fn"
    else:
        return None
    if not hasattr(owner, attribute):
        raise PartitionError(_CURE)
    return owner, attribute


class Stream(Draws):
    """The draws of one call of a net.

    Args:
        seed: gives the seed of the call, when something is drawn. Collective.
    """

    def __init__(self, seed: Callable[[], int]) -> None:
        super().__init__()
        self._make, self._seed, self._count = seed, 0, 0
        self._before: Any = None
        self.is_used = False
        """True if a function that draws was called, even if it drew nothing."""

    def next(self, name: str, shape: tuple[int, ...], layout: Any) -> Draw:
        if not self._count:
            self._seed = self._make()
        self._count += 1
        return Draw(name, shape, layout, seed_of(f"{self._seed} {self._count}"))

    def __enter__(self) -> Stream:
        """Begin a context in which contexts of linop belong to this call."""
        self._before, _HERE.draws = _HERE.draws, self
        return self

    def __exit__(self, *_: object) -> None:
        _HERE.draws = self._before


class Repeated(TorchFunctionMode, Draws):
    """Mode in which the draws of a computation are made again, in their order.

    Raises:
        PartitionError: it draws otherwise than the first time.
    """

    def __init__(self, record: Recorded) -> None:
        TorchFunctionMode.__init__(self)
        Draws.__init__(self)
        self._left = iter(record.draws)
        self._before: Any = None

    def __enter__(self) -> Repeated:
        self._before, _HERE.draws = _HERE.draws, self
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        _HERE.draws = self._before

    def next(self, name: str, shape: tuple[int, ...], layout: Any) -> Draw:
        draw = next(self._left, None)
        if draw is None or (draw.name, draw.shape) != (name, shape):
            first = "nothing was drawn" if draw is None else f"{draw.name} of {draw.shape}"
            raise PartitionError(
                f"{name} of a tensor of shape {shape} in what is computed again: there, {first} "
                f"the first time; draw in the same order"
            )
        return draw

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        from linop.strategies.tensor.drawing.functions import repeated

        if _HERE.draws is not self:  # inside another one, which draws
            return func(*args, **(kwargs or {}))
        return repeated(func, args, kwargs or {}, self)


class _Here(threading.local):
    draws: Draws | None = None


_HERE = _Here()


def _carried() -> Recorded | None:
    """Record of the draws from now on, if this thread is in a call."""
    draws = _HERE.draws
    if draws is None:
        return None
    record = Recorded([], draws.records)
    draws.records.append(record)
    return record


carriers.append(_carried)
