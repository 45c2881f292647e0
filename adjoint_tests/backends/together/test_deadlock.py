"""Deadlocks are found, all of them, and nothing else is taken for one: simulated workers that call
plans, whose notes and messages arrive late and in any order that is possible."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from linop.backends.together.counted_threads import remaining
from linop.backends.together.deadlock import Key, Member, Note, State, Wait, is_deadlock

Call = tuple[int, tuple[int, ...]]
"""A plan, and its group: in each of two stages, everybody sends to everybody."""
STAGES = 2


class World:
    """Workers, what is on its way between them, and a clock."""

    def __init__(self, scripts: Sequence[Sequence[Call]], draw: Any) -> None:
        self.size = len(scripts)
        self.draw = draw
        self.now = 0.0
        self.notes: dict[tuple[int, int], deque[Note]] = {}
        self.flying: list[tuple[Any, ...]] = []
        self.come: set[tuple[Any, ...]] = set()
        self.workers = [Simulated(self, w, script) for w, script in enumerate(scripts)]

    def send(self, sender: int, mail: Sequence[tuple[int, Note]]) -> None:
        for peer, note in mail:
            self.notes.setdefault((sender, peer), deque()).append(note)

    def is_over(self) -> bool:
        """True if nobody has anything to do but to wait, also when all has come that is on its way:
        by what an outsider sees."""
        here, self.come = self.come, self.come | set(self.flying)
        try:
            return not any(worker.can_go_on() for worker in self.workers)
        finally:
            self.come = here

    def go(self) -> bool:
        """One thing that can happen does; whether anything can, but notes about waiting."""
        self.now += self.draw(st.sampled_from([0.0, 0.3]))
        pairs = [pair for pair, box in self.notes.items() if box]
        choices = ["run", *(["fly"] if self.flying else []), *(["note"] if pairs else [])]
        what = self.draw(st.sampled_from(choices))
        if what == "fly":
            one = self.draw(st.integers(0, len(self.flying) - 1))
            self.come.add(self.flying.pop(one))
        elif what == "note":
            sender, peer = self.draw(st.sampled_from(pairs))
            self.workers[peer].inbox.append((sender, self.notes[sender, peer].popleft()))
        else:
            self.draw(st.sampled_from(self.workers)).step()
        return not self.is_over()


class Simulated:
    """A worker with a program; it reads its notes while it waits, and then only."""

    def __init__(self, world: World, worker: int, script: Sequence[Call]) -> None:
        self.world = world
        self.worker = worker
        self.member = Member(worker, world.size)
        self.inbox: deque[tuple[int, Note]] = deque()
        self.runs: dict[Key, int] = {}
        self.wait: Wait | None = None
        self.verdict: Note | None = None
        self.life = self.lives(script)

    def lives(self, script: Sequence[Call]) -> Iterator[Wait]:
        for plan, group in script:
            key = "plan", plan
            run = self.runs.get(key, 0) + 1
            others = [w for w in group if w != self.worker]
            for stage in range(STAGES):
                self.world.flying += [(key, run, stage, self.worker, w) for w in others]
                words = f"{plan} of {group}"
                yield Wait(words, key, (run, stage), (run, stage), tuple(others))
            self.runs[key] = run
        everybody = tuple(w for w in range(self.world.size) if w != self.worker)
        while True:
            yield Wait("the end", ("end", 0), (1, 0), (1, 0), everybody, ended=True)

    def late(self) -> tuple[int, ...]:
        assert self.wait is not None
        key, (run, stage) = self.wait.key, self.wait.needs
        if self.wait.ended:
            ends = (worker.wait is not None and worker.wait.ended for worker in self.world.workers)
            return () if all(ends) else self.wait.peers
        return tuple(
            p for p in self.wait.peers if (key, run, stage, p, self.worker) not in self.world.come
        )

    def can_go_on(self) -> bool:
        if self.verdict is not None:
            return False
        return self.wait is None or not (self.wait.ended or self.late())

    def state(self) -> State | None:
        assert self.wait is not None
        late = self.late()
        points = {key: (run, float("inf")) for key, run in self.runs.items()}
        return State(self.wait._replace(peers=late), points) if late else None

    def step(self) -> None:
        world, member = self.world, self.member
        if self.verdict is not None:
            return
        if self.wait is None:
            self.wait = next(self.life)
        if not self.late() and not member.held:
            if not self.wait.ended:
                world.send(self.worker, member.leaves(world.now))
                self.wait = None
            return
        world.send(self.worker, member.waits(world.now))
        if self.inbox:
            sender, note = self.inbox.popleft()
            world.send(self.worker, member.hears(sender, note, self.state(), world.now))
        world.send(self.worker, member.tick(world.now, self.state()))
        self.verdict = member.verdict


@st.composite
def programs(draw: Any) -> list[list[Call]]:
    """One program for all workers, of which some leave out calls or end early."""
    size = draw(st.integers(2, 4))
    groups = st.lists(st.integers(0, size - 1), min_size=2, max_size=size, unique=True)
    plans = [tuple(sorted(group)) for group in draw(st.lists(groups, min_size=1, max_size=3))]
    calls = draw(st.lists(st.sampled_from(list(enumerate(plans))), max_size=4))
    scripts = [[call for call in calls if w in call[1]] for w in range(size)]
    for _ in range(draw(st.integers(0, 2))):
        script = draw(st.sampled_from(scripts))
        if script:
            del script[draw(st.integers(0, len(script) - 1))]
    return scripts


@pytest.mark.slow
@given(st.data(), programs())
@settings(max_examples=150, deadline=None)
def test_a_deadlock_is_found_and_nothing_else_is(data: Any, scripts: list[list[Call]]) -> None:
    world = World(scripts, data.draw)
    for _ in range(data.draw(st.integers(0, 150))):
        world.go()
        if any(worker.member.verdict for worker in world.workers):
            assert world.is_over()
    # From here on nothing is left to chance: what can happen, does, in turn.
    for _ in range(80):
        world.come.update(world.flying)
        world.flying.clear()
        for (sender, peer), box in world.notes.items():
            world.workers[peer].inbox.extend((sender, note) for note in box)
            box.clear()
        for worker in world.workers:
            for _ in range(1 + len(worker.inbox)):
                worker.step()
        world.now += 1
    assert world.is_over()
    stuck = any(not worker.wait.ended for worker in world.workers if worker.wait)
    texts = {worker.member.verdict and worker.member.verdict.text for worker in world.workers}
    assert len(texts) == 1
    assert (None in texts) != stuck


def wait(key: int, at: int, peers: tuple[int, ...], ended: bool = False) -> State:
    return State(Wait("a message", ("plan", key), (at, 0), (at, 0), peers, ended), {})


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ([wait(1, 2, (1,)), wait(2, 1, (0,))], True),  # each in another plan
        ([wait(1, 2, (1,)), wait(1, 2, (0,))], False),  # in one: both have sent
        ([wait(1, 2, (1,)), wait(1, 1, (0,))], False),  # the second is a run behind, and goes on
        ([wait(1, 2, (1,)), wait(3, 1, (0,), ended=True)], True),
        ([wait(3, 1, (1,), ended=True), wait(3, 1, (0,), ended=True)], False),
        ([wait(1, 2, ()), wait(2, 1, (0,))], False),  # whom the first waits for is not known
        ([wait(1, 2, (1,)), State(wait(2, 1, (0,)).wait, {("plan", 1): (2, 0.0)})], False),
    ],
)
def test_what_is_a_deadlock(states: list[State], expected: bool) -> None:
    assert is_deadlock(dict(enumerate(states))) is expected


def test_threads_that_begin_to_wait_while_others_are_looked_at() -> None:
    threads: set[threading.Thread] = set()
    late = threading.Thread()

    class Ended(threading.Thread):
        def is_alive(self) -> bool:
            threads.add(late)
            return False

    class Running(threading.Thread):
        def is_alive(self) -> bool:
            threads.add(late)
            return True

    threads |= {Ended(), running := Running()}
    assert set(remaining(threads)) == {running, late} == threads
