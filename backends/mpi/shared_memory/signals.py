"""Signals of one bound plan in shared memory, and the operations that wait for them.

Each signal is one increasing number, the run's, with one writer and one reader, in a cache line of
its own. Stores are seen in order on x86; elsewhere the window is synchronised before a signal is
written and after it is read. The signal of a message also holds the call number
(`linop.backends.mpi.shared_memory.runs`), so that a missing call is detected.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from functools import partial

from linop.backends.engine.execution.instructions import Call, Later, Operation, Ready, Spin
from linop.backends.engine.execution.numbers import Condition, Item, Joined, Number, Variable
from linop.backends.engine.roads.call_numbers import TURNS
from linop.backends.mpi.shared_memory.offers import PIECES, Line
from linop.backends.mpi.shared_memory.plan_memory import PlanMemory
from linop.backends.mpi.shared_memory.runs import Peers, Runs, WaitUntil, Word
from linop.backends.together.transport import Awaited, Who, peers_named

_LINE = 64
"""Bytes of a cache line, and the distance of signals."""
ORDERED = platform.machine() in ("x86_64", "AMD64", "i686")
"""True if other cores see stores in program order."""

RUN, MARK = Variable("n"), Variable("e")
"""Number of the run; and of the run and the call, as signals of messages hold it."""
TURN = Variable("t")
"""Index of the run's buffer among those used in turn."""
PIECES_BASE, PIECE = Variable("m"), Variable("k")
"""Signal before the first piece of a message in this run; number of a piece, from 1."""


class Signals:
    """This worker's signals for a plan, which its peers write.

    Args:
        peers: workers to which, or from which, messages go.
        lines: number of signals to allocate.
        turns: number of buffers used in turn for messages.

    Attributes:
        flags: the signals, as integers.
        gone: index of the flag that a peer sets when it releases its plan.
    """

    def __init__(
        self,
        memory: PlanMemory,
        peers: Sequence[int],
        lines: int,
        until: WaitUntil,
        spins: int,
        about: Callable[[], str],
    ) -> None:
        self.runs = Runs()
        self.gone = lines * _LINE // 8
        self.about = about
        self._pool = memory.pool
        self._until = until
        self._spins = max(spins, 1)
        self._lines = 0
        self._block = memory.take(lines * _LINE + (len(peers) + 1) * 8)
        own = self._pool.own(self._block)
        own[:] = 0
        self.flags = own.data.cast("q")
        words = {peer: k for k, peer in enumerate(peers, self.gone + 1)}
        self.peers = Peers(self.runs, self.flags, self.gone, words, until, about)

    # Locations

    @property
    def _first(self) -> int:
        """Index of the first signal in its window."""
        return self._block.offset // 8

    def line(self) -> Line:
        """Location of a new signal: the window, and the index in it."""
        self._lines += 1
        return self._block.segment, self._first + (self._lines - 1) * _LINE // 8

    def index(self, line: Line | None) -> int:
        """Index in `flags` of a signal."""
        assert line is not None
        return line[1] - self._first

    def word(self, peer: int) -> Word:
        """Location of the signals of a peer's release."""
        first, own = self._first, self.peers.words[peer]
        return Word(self._block.segment, first + self.gone, first + own)

    def tell(self, words: dict[int, Word]) -> None:
        """Set the locations where peers are told of this worker's release."""
        heard = {p: partial(self.flags.__getitem__, k) for p, k in self.peers.words.items()}
        numbers = self._pool.numbers
        self.runs.tell([(numbers(w.segment, p), w, heard[p]) for p, w in words.items()])

    # Operations

    def flag(self, index: Number | int) -> Item:
        return Item(self.flags, index)

    @property
    def sync(self) -> list[Operation]:
        """Operations between a write of data and its signal, and between a signal and a read of
        data."""
        return [] if ORDERED else [Call(self._pool.sync)]

    def spin(self, condition: Condition | Joined, ready: object, who: Who) -> list[Operation]:
        """Operations that wait for a condition: they spin for a while first, since other workers
        take microseconds."""
        return [Spin(self._spins, condition, Call(self._until, (ready, who))), *self.sync]

    def until_come(
        self, stage: int, lines: dict[int, int], turns: int
    ) -> tuple[list[Operation], Ready]:
        """Operations that wait for the completion signals of a stage's messages; and a test that
        they have arrived, for `start`.

        Args:
            lines: index of each peer's signal.
            turns: number of signals used in turn, at consecutive indices.
        """
        runs = self.runs

        def late(said: int) -> list[int]:
            turn = runs.number % turns
            return [p for p, k in lines.items() if not self.peers.come(p, k + turn, said)]

        def ready(said: int) -> bool:
            return not late(said)

        def who() -> Awaited:
            return self._missing(stage, late(runs.number % TURNS) or list(lines))

        at = {p: TURN + k if turns > 1 else k for p, k in lines.items()}
        come = [Condition(self.flag(k), "==", MARK) for k in at.values()]
        operations = self.spin(Joined("and", come), Later(ready, [MARK]), who)
        return operations, lambda: ready(runs.number % TURNS)

    def until_pieces(
        self, stage: int, lines: dict[int, int]
    ) -> tuple[list[Operation], Callable[[int], bool]]:
        """Operations that wait for piece `PIECE` of some messages; and a test that `count` pieces
        have arrived."""
        flags, runs = self.flags, self.runs

        def late(count: int) -> list[int]:
            return [p for p, k in lines.items() if flags[k] < runs.number * PIECES + count]

        def ready(count: int) -> bool:
            return not late(count) or self.peers.gone()

        def who() -> Awaited:
            # Checks all pieces: a peer is named if any of its pieces is missing.
            return self._missing(stage, late(1) or late(PIECES) or list(lines))

        come = [Condition(self.flag(k), ">=", PIECES_BASE + PIECE) for k in lines.values()]
        return self.spin(Joined("and", come), Later(ready, [PIECE]), who), ready

    def _missing(self, stage: int, peers: Sequence[int]) -> Awaited:
        words = f"a message from {peers_named(peers)} in stage {stage} of {self.about()}"
        return Awaited(words, peers, stage)
