"""Generators of the schedules of the literature: computations and updates, without messages.

All but `backward_first` are one rule, `_in_turn`, with other orders of forwards and backwards and
other warm-ups. p workers, M micro-batches, s a stage, from 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest

from linop.errors import ArgumentError
from linop.schedules.actions import Action, Kind
from linop.schedules.schedule import Schedule

F, B, U = Kind.FORWARD, Kind.BACKWARD, Kind.UPDATE
I, W = Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT  # noqa: E741  the field's letters


def gpipe(stages: int, micro_batches: int) -> Schedule:
    """All forwards, then all backwards, then an update (Huang et al., 2019).

    Raises:
        ArgumentError: a number is less than 1.

    Example:
        >>> print(linop.schedules.gpipe(2, 3).to_csv())
        0F0,0F1,0F2,0B0,0B1,0B2,0U
        1F0,1F1,1F2,1B0,1B1,1B2,1U
    """
    _at_least(1, stages=stages, micro_batches=micro_batches)
    each = range(micro_batches)
    rows = []
    for s in range(stages):
        forwards, backwards = ([Action(s, kind, m) for m in each] for kind in (F, B))
        rows.append([*forwards, *backwards, Action(s, U)])
    return _schedule(rows, "gpipe")


def one_forward_one_backward(stages: int, micro_batches: int) -> Schedule:
    """1F1B, also PipeDream-flush (Narayanan et al., 2021): as many forwards as stages follow, then
    forwards and backwards in turn, then the other backwards, then an update.

    Raises:
        ArgumentError: a number is less than 1.

    Example:
        >>> print(linop.schedules.one_forward_one_backward(2, 3).to_csv())
        0F0,0F1,0B0,0F2,0B1,0B2,0U
        1F0,1B0,1F1,1B1,1F2,1B2,1U
    """
    _at_least(1, stages=stages, micro_batches=micro_batches)
    rows = []
    for s in range(stages):
        forwards = [Action(s, F, m) for m in range(micro_batches)]
        backwards = [(Action(s, B, m),) for m in range(micro_batches)]
        rows.append([*_in_turn(stages - 1 - s, forwards, backwards), Action(s, U)])
    return _schedule(rows, "1f1b")


def interleaved(stages: int, micro_batches: int, chunks: int = 2) -> Schedule:
    """Interleaved 1F1B (Narayanan et al., 2021): ``p = stages / chunks`` workers, of which worker r
    has the stages r, r + p, …, each a chunk of its model. Forwards go through the chunks p
    micro-batches at a time, backwards through the chunks in reverse order.

    Raises:
        ArgumentError: a number is less than 1, `chunks` does not divide `stages`, or the number of
            workers does not divide `micro_batches`.

    Example:
        Worker 0 has the stages 0 and 2, worker 1 the stages 1 and 3:

        >>> table = linop.schedules.interleaved(stages=4, micro_batches=2)
        >>> print(table.only(["F"]).to_csv())
        0F0,0F1,2F0,2F1
        1F0,1F1,3F0,3F1
    """
    _at_least(1, stages=stages, micro_batches=micro_batches, chunks=chunks)
    if stages % chunks:
        raise ArgumentError(f"stages: a multiple of chunks={chunks} expected, given {stages}")
    workers = stages // chunks
    if micro_batches % workers:
        raise ArgumentError(
            f"micro_batches: interleaved 1F1B goes through the chunks {workers} micro-batches at a "
            f"time, one for each worker: a multiple of {workers} expected, given {micro_batches}"
        )
    order = [
        (chunk, first + k)
        for first in range(0, micro_batches, workers)
        for chunk in range(chunks)
        for k in range(workers)
    ]
    rows = []
    for worker in range(workers):
        own = range(worker, stages, workers)
        forwards = [Action(own[chunk], F, m) for chunk, m in order]
        backwards = [(Action(own[-1 - chunk], B, m),) for chunk, m in order]
        warm_up = 2 * (workers - 1 - worker) + (chunks - 1) * workers
        rows.append([*_in_turn(warm_up, forwards, backwards), *(Action(s, U) for s in own)])
    return _schedule(rows, "interleaved-1f1b")


def zero_bubble_h1(stages: int, micro_batches: int) -> Schedule:
    """ZB-H1 (Qi et al., 2024): 1F1B with backwards in two halves, I and W, of which stage s does W
    for the micro-batch s before that of I, so that all hold p activations; the last W fill what was
    idle.

    Raises:
        ArgumentError: a number is less than 1.

    Example:
        The gradients of the weights (W) wait until there is nothing else to do:

        >>> print(linop.schedules.zero_bubble_h1(2, 2).to_csv())
        0F0,0F1,0I0,0W0,0I1,0W1,0U
        1F0,1I0,1F1,1I1,1W0,1W1,1U
    """
    _at_least(1, stages=stages, micro_batches=micro_batches)
    rows = []
    for s in range(stages):
        forwards = [Action(s, F, m) for m in range(micro_batches)]
        weights = [Action(s, W, m) for m in range(micro_batches)]
        backwards = [
            (Action(s, I, m), *weights[max(0, m - s) : max(0, m - s + 1)])
            for m in range(micro_batches)
        ]
        late = weights[max(0, micro_batches - s) :]
        rows.append([*_in_turn(stages - 1 - s, forwards, backwards), *late, Action(s, U)])
    return _schedule(rows, "zb-h1")


def backward_first(
    stages: int, micro_batches: int, in_flight: Sequence[int] | None = None
) -> Schedule:
    """The greedy rule of PipeDream (Harlap et al., 2018): in steps of equal length every stage does
    the next backward whose gradient has come, else the next forward whose input has come.

    Args:
        in_flight: for each stage, the largest number of micro-batches that wait for their backward;
            by default p − s, with which the rule gives the table of 1F1B. Without a bound the
            first stages would fill their wait with forwards.

    Raises:
        ArgumentError: a number is less than 1, or `in_flight` has another length than `stages`.

    Example:
        >>> from linop.schedules import backward_first, one_forward_one_backward
        >>> backward_first(3, 5).workers == one_forward_one_backward(3, 5).workers
        True
        >>> print(backward_first(2, 2, in_flight=[1, 1]).to_csv())  # one micro-batch at a time
        0F0,0B0,0F1,0B1,0U
        1F0,1B0,1F1,1B1,1U
    """
    _at_least(1, stages=stages, micro_batches=micro_batches)
    most = range(stages, 0, -1) if in_flight is None else in_flight
    if not isinstance(most, Sequence) or len(most) != stages:
        raise ArgumentError(f"in_flight: {stages} numbers expected, one a stage, given {most!r}")
    for number in most:
        _at_least(1, in_flight=number)
    rows: list[list[Action]] = [[] for _ in range(stages)]
    forward, backward = [0] * stages, [0] * stages
    while min(backward) < micro_batches:
        came = [micro_batches, *forward], [*backward[1:], micro_batches]  # as the step begins
        for s in range(stages):
            if backward[s] < min(came[1][s], came[0][s + 1]):
                rows[s].append(Action(s, B, backward[s]))
                backward[s] += 1
            elif forward[s] < came[0][s] and forward[s] - backward[s] < most[s]:
                rows[s].append(Action(s, F, forward[s]))
                forward[s] += 1
    return _schedule([[*row, Action(s, U)] for s, row in enumerate(rows)], "backward-first")


def pipedream(stages: int, micro_batches: int) -> Schedule:
    """PipeDream with stashed weights (Harlap et al., 2018): 1F1B without a flush, and an update
    after every backward. Stage s reads version ``max(0, m − p + 1 + s)`` for micro-batch m, its
    newest, and keeps it until the backward, which reads the same.

    Raises:
        ArgumentError: a number is less than 1.

    Example:
        Stage 0 reads version 0 of its weights (``@0``) for two micro-batches, until it is updated:

        >>> print(linop.schedules.pipedream(2, 3).to_csv())
        0F0@0,0F1@0,0B0@0,0U,0F2@1,0B1@0,0U,0B2@1,0U
        1F0@0,1B0@0,1U,1F1@1,1B1@1,1U,1F2@2,1B2@2,1U
    """
    _at_least(1, stages=stages, micro_batches=micro_batches)
    rows = []
    for s in range(stages):
        late = stages - 1 - s
        read = [(m, max(0, m - late)) for m in range(micro_batches)]
        forwards = [Action(s, F, m, version) for m, version in read]
        backwards = [(Action(s, B, m, version), Action(s, U)) for m, version in read]
        rows.append(_in_turn(late, forwards, backwards))
    return _schedule(rows, "pipedream")


def pipedream_2bw(stages: int, micro_batches: int, batches: int = 2) -> Schedule:
    """PipeDream-2BW (Narayanan et al., 2021): 1F1B without a flush over several batches, and an
    update after each. Batch t reads version ``max(0, t − 1)``, so that two are kept.

    Args:
        micro_batches: number of micro-batches a batch; those of batch t are
            ``t * micro_batches``, …, ``(t + 1) * micro_batches − 1``.
        batches: number of batches, and of updates.

    Raises:
        ArgumentError: a number is less than 1, or a batch has fewer micro-batches than there are
            stages, the paper's bound: far below, forwards would read versions to come.

    Example:
        Two batches of two micro-batches, and no wait between them:

        >>> table = linop.schedules.pipedream_2bw(2, 2)
        >>> print(table.to_csv())
        0F0@0,0F1@0,0B0@0,0F2@0,0B1@0,0U,0F3@0,0B2@0,0B3@0,0U
        1F0@0,1B0@0,1F1@0,1B1@0,1U,1F2@0,1B2@0,1F3@0,1B3@0,1U
        >>> linop.schedules.check(table).versions
        {0: 2, 1: 2}
    """
    _at_least(1, stages=stages, micro_batches=micro_batches, batches=batches)
    if micro_batches < stages:
        raise ArgumentError(
            f"micro_batches: PipeDream-2BW needs at least one for each of the {stages} stages, "
            f"given {micro_batches}"
        )
    rows = []
    for s in range(stages):
        read = [(m, max(0, m // micro_batches - 1)) for m in range(batches * micro_batches)]
        forwards = [Action(s, F, m, version) for m, version in read]
        backwards = [
            (Action(s, B, m, version), *[Action(s, U)] * ((m + 1) % micro_batches == 0))
            for m, version in read
        ]
        rows.append(_in_turn(stages - 1 - s, forwards, backwards))
    return _schedule(rows, "pipedream-2bw")


GENERATORS: dict[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved-1f1b": interleaved,
    "zb-h1": zero_bubble_h1,
    "pipedream": pipedream,
    "pipedream-2bw": pipedream_2bw,
    "backward-first": backward_first,
}
"""Generators by the name of their schedules; arguments are the numbers of stages and micro-batches,
and `chunks` for ``interleaved-1f1b``, `batches` for ``pipedream-2bw``."""


def _in_turn(
    warm_up: int, forwards: Sequence[Action], backwards: Iterable[tuple[Action, ...]]
) -> Iterator[Action]:
    """A number of forwards, then a forward and a backward, with what goes with it, in turn."""
    yield from forwards[:warm_up]
    for forward, group in zip_longest(forwards[warm_up:], backwards):
        if forward is not None:
            yield forward
        yield from group


def _schedule(rows: Iterable[Iterable[Action]], name: str) -> Schedule:
    return Schedule(tuple(map(tuple, rows)), name)


def _at_least(least: int, **numbers: int) -> None:
    for name, number in numbers.items():
        if not isinstance(number, int) or number < least:
            raise ArgumentError(f"{name}: at least {least} expected, given {number!r}")
