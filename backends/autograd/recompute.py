"""Activation checkpointing: results of plans are recorded, and replayed instead of communicated
again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

from linop.backends.autograd.bridge import Bridge
from linop.errors import BackendError


class Runs(Protocol):
    """A callable of tensors, as a `Bridge` is."""

    @property
    def plan(self) -> object:
        """Its description, for errors."""

    def run(self, tensors: Sequence[Any]) -> tuple[Any, ...]:
        """A call."""


Kept = list[tuple[Runs, list[Any], int]]
"""Of each call: what was called, the results, and the sum of their version counters."""


class Carried(Protocol):
    """State of a first computation that its recomputations need."""

    def close(self) -> None:
        """End the first computation."""

    def again(self) -> AbstractContextManager[Any]:
        """Context of a recomputation."""


carriers: list[Callable[[], Carried | None]] = []
"""Called when a first computation begins, in its thread."""


def checkpoint_context() -> tuple[Any, Any]:
    """Context function for ``torch.utils.checkpoint.checkpoint(…, use_reentrant=False,
    context_fn=linop.autograd.checkpoint_context)``: results of operators are kept, and are not
    communicated again in the recomputation. So one worker may checkpoint layers that others do not.

    Returns:
        The contexts of the first computation, and of its recomputations.

    Example:
        >>> from torch.utils.checkpoint import checkpoint
        >>> gather = linop.all_gather(linop.TensorSpace((4,), linop.Partition((2,))))
        >>> layer = lambda x: torch.sin(linop.autograd.apply(gather, torch.cos(x)))
        >>> kept = {"use_reentrant": False, "context_fn": linop.autograd.checkpoint_context}
        >>> def main(backend):
        ...     checkpoint(layer, torch.ones(2).double().requires_grad_(), **kept).sum().backward()
        ...     return [row.calls for row in backend.counters()]
        >>> linop.launch(main, workers=2)  # forward and adjoint: the recomputation sends nothing
        [[1, 1], [1, 1]]
    """
    kept: Kept = []
    carried: list[Carried] = []
    return _Context(kept, carried, replays=False), _Context(kept, carried, replays=True)


class _Context:
    """Context in which `run` records results of this thread's plans, or replays them in order."""

    def __init__(self, kept: Kept, carried: list[Carried], replays: bool) -> None:
        self._kept, self._carried, self._replays = kept, carried, replays
        self._stacks: list[ExitStack] = []

    def __enter__(self) -> None:
        self._before = _LOCAL.context, _LOCAL.replays
        _LOCAL.context, _LOCAL.replays = self, self._replays or _LOCAL.replays
        self._left = iter(self._kept)
        self._stacks.append(ExitStack())
        if not self._replays:
            self._carried[:] = [one for carry in carriers if (one := carry()) is not None]
            for one in self._carried:
                self._stacks[-1].callback(one.close)
        for one in self._carried if self._replays else ():
            self._stacks[-1].enter_context(one.again())

    def __exit__(self, *error: object) -> None:
        self._stacks.pop().close()
        _LOCAL.context, _LOCAL.replays = self._before

    def run(self, bridge: Runs, tensors: Sequence[Any]) -> tuple[Any, ...]:
        if self._replays:
            return self._replayed(bridge)
        results = bridge.run(tensors)
        # A detached tensor shares memory and version counter with the original.
        seen = [result.detach() for result in results]
        self._kept.append((bridge, seen, sum(result._version for result in seen)))
        return results

    def _replayed(self, bridge: Runs) -> tuple[Any, ...]:
        first, kept, version = next(self._left, (None, [], 0))
        if first is None:
            raise BackendError(f"{bridge.plan!r}: was not called when this was computed first")
        if first != bridge:
            raise BackendError(f"{bridge.plan!r}: first, {first.plan!r} was called here")
        if sum(tensor._version for tensor in kept) != version:
            raise BackendError(
                f"{bridge.plan!r}: a result that linop.autograd.checkpoint_context keeps was "
                f"changed in place; change a copy"
            )
        return tuple(tensor.detach() for tensor in kept)


class _Local(threading.local):
    """Checkpointing state of a thread."""

    context: _Context | None = None
    replays = False


_LOCAL = _Local()


@contextmanager
def unrecorded() -> Iterator[None]:
    """Context in which results are neither recorded nor replayed: plans are run."""
    before, _LOCAL.context = (_LOCAL.context, _LOCAL.replays), None
    _LOCAL.replays = False
    try:
        yield
    finally:
        _LOCAL.context, _LOCAL.replays = before


def in_checkpoint() -> bool:
    """True if results of plans are recorded or replayed in this thread."""
    return _LOCAL.context is not None


def is_replaying() -> bool:
    """True if recorded results are replayed in this thread."""
    return _LOCAL.replays


def opened(bridge: Bridge) -> int:
    """Number of a new call; 0 for a replayed one, which has a number."""
    return 0 if _LOCAL.replays else bridge.order.opened()


def run(bridge: Runs, tensors: Sequence[Any]) -> tuple[Any, ...]:
    """Call a plan, recording or replaying its results under `checkpoint_context`."""
    context = _LOCAL.context
    return bridge.run(tensors) if context is None else context.run(bridge, tensors)
