"""Plans run one step at a time, in one process: the oracle of the verifier's tests.

It shares no code with lowering, verifier or backends. A plan that reads what is not there, writes
out of bounds, waits in vain, or leaves a message behind is `Broken`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from linop.planning.patterns import Kind
from linop.planning.plan import (
    GROUP,
    Advance,
    Alias,
    Apply,
    Collective,
    LoweredPlan,
    Make,
    Message,
    Put,
    Receive,
    Send,
    Step,
    Sum,
    Wait,
)
from linop.spaces.region import Region, Subset

Arrays = Mapping[str, np.ndarray]


class Broken(Exception):
    """The plans cannot run."""


def interpret(plans: Sequence[LoweredPlan], arguments: Mapping[int, Arrays]) -> dict[int, Arrays]:
    """The results of all workers, by region name.

    Raises:
        Broken: there are none.
    """
    mail: dict[Any, Any] = {}
    runs = [_Run(plan, arguments[plan.worker], mail) for plan in plans]
    if len({run.plan.worker for run in runs}) < len(runs):
        raise Broken("two plans of one worker")
    with np.errstate(all="ignore"):  # garbage may be too large for a dtype
        _run_all(runs, mail)
    return {run.plan.worker: run.results() for run in runs}


def _run_all(runs: Sequence[_Run], mail: dict[Any, Any]) -> None:
    left = {run.plan.worker: run.steps() for run in runs}
    while left:
        before = len(mail), sum(run.done for run in runs)
        for worker, steps in list(left.items()):
            if next(steps, "ended") == "ended":
                del left[worker]
        if left and before == (len(mail), sum(run.done for run in runs)):
            raise Broken("a circle")
    if any(not taken for taken, _ in mail.values()):
        raise Broken("a message is left")


def require(condition: Any, what: str) -> None:
    if not condition:
        raise Broken(what)


class _Run:
    """One worker while it runs."""

    def __init__(self, plan: LoweredPlan, arguments: Arrays, mail: dict[Any, Any]) -> None:
        self.plan, self.mail = plan, mail
        self.done = 0
        self.random = np.random.default_rng(plan.worker + 1)
        self.current = {region.name: arguments.get(region.name) for region in plan.inputs}
        self.new: dict[str, np.ndarray] = {}
        self.names_read: set[str] = set()
        self.ahead: dict[Region, np.ndarray] = {}
        self.expected: dict[int, Receive] = {}
        self.arrived: dict[int, np.ndarray] = {}
        self.began: Collective | None = None

    def steps(self) -> Iterator[None]:
        """All steps; yields where it waits."""
        for step in self.plan.steps:
            if isinstance(step, Wait):
                for peer, receive in list(self.expected.items()):
                    while (came := self.arriving(peer, receive.stage)) is None:
                        yield
                    require(came.size == receive.size, "a message of another size")
                    require(came.dtype == self.plan.dtype, "a message of another dtype")
                    self.arrived[peer] = came
                self.expected = {}
            else:
                self.step(step)
            self.done += 1

    def step(self, step: Step) -> None:
        match step:
            case Receive():
                require(step.peer not in self.expected, "two receives")
                self.expected[step.peer] = step
            case Collective():
                self.post((step.stage, self.plan.worker, GROUP), step, taken=True)
                self.began = step
            case Send():
                self.post((step.stage, self.plan.worker, step.peer), step, taken=False)
            case Make():
                self.make(step)
            case Alias():
                require(step.source.memory == step.target.memory, "another memory")
                self.bring(step.target, self.whole(step.source))
            case Put():
                self.put(step)
            case Sum():
                self.put(step.first)
                self.put(step.second)
            case Apply():
                self.apply(step)
            case Advance():
                require(not self.expected, "a message that nobody waited for")
                taken = set(self.current) if step.taken is None else set(step.taken)
                require(taken <= self.current.keys(), "takes what is not there")
                require(self.names_read <= taken, "reads what it does not take")
                stay = {n: a for n, a in self.current.items() if n not in taken}
                require(stay.keys().isdisjoint(self.new), "makes what stays")
                self.current, self.new, self.names_read = stay | self.new, {}, set()
                self.arrived, self.began = {}, None

    def make(self, step: Make) -> None:
        """New memory; or a part of that of a region which is made in the next stage."""
        memory = self.ahead.pop(step.region, None)
        if step.within is not None:
            target = step.within.region
            garbage = self.random.integers(10**5, 10**6, target.shape).astype(self.plan.dtype)
            memory = self.ahead.setdefault(target, garbage)[step.within.slices]
        if memory is None:
            garbage = self.random.integers(10**5, 10**6, step.region.shape)
            memory = garbage.astype(self.plan.dtype)
        require(memory.shape == step.region.shape, "memory of another shape")
        if step.zeroed:
            memory[...] = 0
        self.bring(step.region, memory)

    def post(self, key: Any, step: Send, taken: bool) -> None:
        require(key not in self.mail, "two messages")
        data = [self.part(part).ravel() for part in step.parts]
        packed = np.concatenate([np.zeros(0, self.plan.dtype), *data]).astype(self.plan.dtype)
        self.mail[key] = taken, (step, packed)

    def arriving(self, peer: int, stage: int) -> np.ndarray | None:
        """A message from a peer, or None if it has not come yet."""
        if peer == GROUP:
            return self.collective(stage)
        key = stage, peer, self.plan.worker
        if key not in self.mail:
            return None
        _, (step, packed) = self.mail[key]
        self.mail[key] = True, (step, packed)
        return packed

    def collective(self, stage: int) -> np.ndarray | None:
        if self.began is None:
            raise Broken("no collective")
        found, me = self.began.pattern, self.plan.worker
        if any((stage, w, GROUP) not in self.mail for w in found.group):
            return None
        posts = {w: self.mail[stage, w, GROUP][1] for w in found.group}
        require(me in posts, "not of the group")
        require(all(step.pattern == found for step, _ in posts.values()), "another collective")
        given = {w: packed for w, (_, packed) in posts.items()}
        match found.kind:
            case Kind.BROADCAST:
                return given[found.root]
            case Kind.REDUCE | Kind.ALL_REDUCE:
                return _sum([x for w, x in given.items() if len(x) or w != found.root])
            case Kind.ALL_GATHER:
                require(all(len(x) == found.count(w) for w, x in given.items()), "sizes")
                return np.concatenate(list(given.values()))
            case Kind.REDUCE_SCATTER:
                cuts = np.cumsum([found.count(w) for w in found.group])
                require(all(len(x) == cuts[-1] for x in given.values()), "sizes")
                k = found.group.index(me)
                return _sum(list(given.values()))[cuts[k] - found.count(me) : cuts[k]]
            case _:
                return self.all_to_all(posts)

    def all_to_all(self, posts: Mapping[int, Any]) -> np.ndarray:
        group = list(posts)
        k, pieces = group.index(self.plan.worker), []
        for w, (step, packed) in posts.items():
            require(len(packed) == sum(step.sent), "sizes")
            cuts = np.cumsum(step.sent)
            pieces.append(packed[cuts[k] - step.sent[k] : cuts[k]])
            require(self.began and self.began.received[group.index(w)] == len(pieces[-1]), "sizes")
        return np.concatenate(pieces)

    def bring(self, region: Region, array: np.ndarray) -> None:
        require(region.name not in self.new, "made twice")
        require(array.shape == region.shape, "another shape")
        self.new[region.name] = array.astype(self.plan.dtype, copy=False)

    def whole(self, region: Region) -> np.ndarray:
        array = self.current.get(region.name)
        if array is None or array.shape != region.shape:
            raise Broken("no such region")
        self.names_read.add(region.name)
        return array

    def part(self, part: Subset) -> np.ndarray:
        return _box(self.whole(part.region), part)

    def put(self, step: Put) -> None:
        region = step.target.region
        require(region.name in self.new, "not made")
        require(self.new[region.name].shape == region.shape, "another shape")
        target = _box(self.new[region.name], step.target)
        source = self.read(step.source, step.target)
        require(source.shape == target.shape, "another shape")
        if step.stored:
            return
        scaled = (step.coefficient * source).astype(self.plan.dtype)
        target[...] = target + scaled if step.accumulate else scaled

    def read(self, source: Subset | Message, target: Subset) -> np.ndarray:
        if isinstance(source, Subset):
            return self.part(source)
        require(source.peer in self.arrived, "no message")
        message, end = self.arrived[source.peer], source.offset + target.size
        require(0 <= source.offset and end <= len(message), "past the end")
        return message[source.offset : end].reshape(target.shape)

    def apply(self, step: Apply) -> None:
        call = step.call
        require(all(name in self.current for name in call.inputs), "no such region")
        self.names_read.update(call.inputs)
        require(len(step.outputs) == len(call.map.codomain.regions), "results")
        try:
            results = call.map([self.current[name] for name in call.inputs])
        except Exception as error:
            raise Broken("a local map fails") from error
        for region, result in zip(step.outputs, results, strict=True):
            self.bring(region, np.asarray(result))

    def results(self) -> Arrays:
        return {region.name: self.whole(region) for region in self.plan.outputs}


def _box(array: np.ndarray, part: Subset) -> np.ndarray:
    ends = zip(part.start, part.stop, array.shape, strict=True)
    require(all(0 <= a <= b <= n for a, b, n in ends), "out of bounds")
    return array[part.index]


def _sum(terms: Sequence[np.ndarray]) -> np.ndarray:
    require(len({len(term) for term in terms}) == 1, "sizes")
    return np.sum(terms, axis=0).astype(terms[0].dtype)
