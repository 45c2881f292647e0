"""Schedules of checkpoints: which states of a nonlinear time loop are kept, and which steps run
again, so that the adjoint meets every step at its state, backwards.

A schedule is data: a list of actions. `predicted` counts what it takes without running anything;
`linop.loops.evolution` runs it, and counts what it took.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple

from linop.errors import ArgumentError
from linop.loops.over_time import steps
from linop.spaces.region import integer

KEEP, RUN, LOAD, DROP, BACK, TURN = "keep", "run", "load", "drop", "back", "turn"


class Action(NamedTuple):
    """One action, on the state before a step, or a step.

    Attributes:
        kind: `KEEP` the state, `LOAD` or `DROP` the one that is kept; `RUN` the steps from `step`
            to `stop` - 1; go `BACK` over the step that ran last; `TURN`: the forward loop ends.
    """

    kind: str
    step: int
    stop: int = 0


class Counts(NamedTuple):
    """The cost of one value and one gradient of a time loop.

    Attributes:
        states: largest number of states that are kept at once.
        steps: steps that run, each of them once or several times.
        recomputed: those of them that are not the first of their number.

    Example:
        >>> linop.loops.Every(10).predicted(100)
        Counts(states=19, steps=280, recomputed=180)
    """

    states: int
    steps: int
    recomputed: int


class Checkpoints(ABC):
    """A schedule of checkpoints for loops of any length.

    Example:
        >>> actions = list(linop.loops.Every(1).actions(2))
        >>> [(action.kind, action.step) for action in actions][:4]
        [('keep', 0), ('run', 0), ('keep', 1), ('run', 1)]
    """

    @abstractmethod
    def _actions(self, n: int) -> Iterator[Action]:
        """The actions for n > 0 steps."""

    def actions(self, n: int) -> Iterator[Action]:
        """The actions of a loop of n steps and of its adjoint.

        Raises:
            ArgumentError: n is no whole number from 0; or a library is missing.
        """
        return self._actions(n) if steps("checkpoints", n) else iter([Action(TURN, 0)])

    def predicted(self, n: int) -> Counts:
        """The cost of n steps and their adjoint. Raises: as `actions`."""
        now = most = ran = 0
        for action in self.actions(n):
            now += {KEEP: 1, DROP: -1}.get(action.kind, 0)
            most = max(most, now)
            ran += action.stop - action.step if action.kind == RUN else 0
        return Counts(most, ran, ran - n)


class Every(Checkpoints):
    """Every k-th state is kept on the way, and on the way back all states of one interval of k.

    Of n steps at most ⌈n / k⌉ + k - 1 states are held, fewest for k about √n; a step runs at most
    three times. ``Every(1)`` keeps all states, and runs a step twice.

    Raises:
        ArgumentError: k is no whole number from 1.

    Example:
        >>> [linop.loops.Every(k).predicted(100).states for k in (1, 5, 10, 20)]
        [100, 24, 19, 24]
    """

    def __init__(self, k: int) -> None:
        self.k = integer(k, "Every")
        if self.k < 1:
            raise ArgumentError(f"Every: k is a whole number of steps from 1; given {k!r}")

    def __repr__(self) -> str:
        return f"linop.loops.Every({self.k})"

    def _actions(self, n: int) -> Iterator[Action]:
        starts = range(0, n, self.k)
        for start in starts[:-1]:
            yield Action(KEEP, start)
            yield Action(RUN, start, start + self.k)
        yield Action(KEEP, starts[-1])
        yield from self._there(starts[-1], n)
        yield Action(TURN, n)
        yield from self._back(starts[-1], n)
        for start in reversed(starts[:-1]):
            yield Action(LOAD, start)
            yield from self._there(start, start + self.k)
            yield from self._back(start, start + self.k)

    def _there(self, start: int, stop: int) -> Iterator[Action]:
        """The steps of an interval whose first state is kept, with all its states."""
        for k in range(start, stop):
            if k > start:
                yield Action(KEEP, k)
            yield Action(RUN, k, k + 1)

    def _back(self, start: int, stop: int) -> Iterator[Action]:
        for k in reversed(range(start, stop)):
            if k < stop - 1:
                yield Action(LOAD, k)
                yield Action(RUN, k, k + 1)
            yield Action(BACK, k)
            yield Action(DROP, k)


class Optimal(Checkpoints):
    """The schedule that runs the fewest steps with a given number of states (Griewank & Walther
    2000, algorithm 799), of the library checkpoint_schedules.

    Args:
        states: largest number of states that are kept, from 1.

    Raises:
        ArgumentError: it is no whole number from 1; or the library is missing.

    Example:
        >>> best, simple = linop.loops.Optimal(states=19), linop.loops.Every(10)
        >>> best.predicted(100).states, simple.predicted(100).states
        (19, 19)
        >>> best.predicted(100).recomputed, simple.predicted(100).recomputed
        (179, 180)
    """

    def __init__(self, states: int) -> None:
        self.states = integer(states, "Optimal")
        if self.states < 1:
            raise ArgumentError(f"Optimal: a whole number of states from 1; given {states!r}")
        _library()

    def __repr__(self) -> str:
        return f"linop.loops.Optimal({self.states})"

    def _actions(self, n: int) -> Iterator[Action]:
        library = _library()
        ram = library.StorageType.RAM
        for one in library.MultistageCheckpointSchedule(n, min(self.states, max(n - 1, 1)), 0):
            if isinstance(one, library.Forward):
                if one.write_ics:
                    yield Action(KEEP, one.n0)
                yield Action(RUN, one.n0, one.n1)
            elif isinstance(one, library.Reverse):
                yield Action(BACK, one.n0)
            elif isinstance(one, library.Copy | library.Move):
                assert one.from_storage is ram, one
                yield Action(LOAD, one.n)
                if isinstance(one, library.Move):
                    yield Action(DROP, one.n)
            elif isinstance(one, library.EndForward):
                yield Action(TURN, n)
            else:
                return


def _library() -> Any:
    try:
        import checkpoint_schedules
    except ImportError:
        raise ArgumentError(
            "Optimal: its schedules are of the library checkpoint_schedules: pip install "
            '"linop-algebra[checkpoints]"; linop.loops.Every(k) needs none'
        ) from None
    return checkpoint_schedules
