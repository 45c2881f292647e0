"""Parameters that are one in the sequential model, and that several stages hold: E leads from
one to all, in the blocks of each, and after backward E E.H adds the gradients of all holders."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from linop.backends import Backend, BoundPlan
from linop.backends.autograd.bridge import bridge_of
from linop.backends.autograd.dtypes import numpy_dtype
from linop.backends.autograd.functions import apply
from linop.errors import ArgumentError
from linop.layers.agreement.arguments import digest
from linop.layers.agreement.input_agreement import InputAgreement
from linop.layers.state.state import collect
from linop.layers.state.state_tensors import keyed_parameters
from linop.layers.state.workers import Workers
from linop.operators.algebra import identity, vstack
from linop.operators.collectives import all_reduce, repartition
from linop.operators.operator import LinearOperator
from linop.spaces.decomposition import COPIES
from linop.spaces.partition import Partition
from linop.spaces.tensor import TensorSpace
from linop.strategies.data.reducer import reducer_of
from linop.strategies.pipelines.construction import Plan, check_updates_last
from linop.strategies.pipelines.model.stage_states import Own, prefix_of

_PROCESS = uuid.uuid4().hex
"""This process, in messages to others."""


_Place = tuple[int, str]
"""A stage, and the key of a parameter that it has."""


class _Holder(NamedTuple):
    """A worker's parameter, in words that others compare."""

    space: TensorSpace
    """Of the whole parameter, on the workers of the program."""
    dtype: Any
    digest: str
    """Of the whole values."""
    object: tuple[str, int] | None
    """Process and identifier; None if it is made for a cut stage."""

    @property
    def about(self) -> tuple[Any, ...]:
        """Shape, dtype and values."""
        return self.space.global_shape, self.dtype, self.digest


class _Tie(NamedTuple):
    """A group of tied parameters: those held here, by the region that they are blocks of, and the
    sum over all holders (None for one)."""

    held: dict[str, list[Tensor]]
    sum: LinearOperator | None

    @property
    def parameters(self) -> list[Tensor]:
        """All that are held here."""
        return [p for held in self.held.values() for p in held]


class _Earlier(NamedTuple):
    """Gradients of a parameter before a step: one that is added to that of the step, and one that
    its `Reducer` adds later, which has been summed over the replicas while that of the step, in
    ``no_sync()``, has not."""

    added: Tensor | None
    later: Tensor | None


class TiedWeights:
    """Groups of tied parameters. Constructed by all workers.

    Args:
        names: of each group, the keys of its parameters in the state of the sequential model.

    Attributes:
        copies: identifiers of this worker's parameters that another one of their group precedes.

    Raises:
        ArgumentError: a name is not that of a parameter of which a stage holds blocks, or one
            worker all; or parameters of a group differ. On every worker.
    """

    def __init__(
        self,
        names: Sequence[Sequence[str]],
        plan: Plan,
        backend: Backend,
        agreement: InputAgreement,
        stages: Mapping[int, Own],
    ) -> None:
        self._backend = backend
        own = {
            (s, one.prefix + name): p
            for s, one in stages.items()
            for name, p in keyed_parameters(one.module).items()
        }
        doing = "tie parameters of linop.strategies.Pipeline"

        def work() -> dict[_Place, _Holder]:
            keys = {key for group in names for key in group}
            every = {s: _holders(one, plan.grid(s), keys) for s, one in stages.items()}
            return {(s, key): one for s, some in every.items() for key, one in some.items()}

        said = agreement.gather_objects(agreement.each(work, "tied", doing), doing)
        holders = {place: one for theirs in said for place, one in theirs.items()}
        groups = [_places(group, holders) for group in names]
        self._ties = [_tie(group, own, holders, plan, backend) for group in groups]
        self.copies = {
            id(own[place])
            for group in groups
            for place in group[1:]
            if place in own and own[place] is not own.get(group[0])
        }
        self._before: list[list[_Earlier]] = []
        every = (holders[place].space.partition for group in groups for place in group)
        workers = sorted({worker for grid in every for worker in grid.workers})
        self._used = self._counting(workers) if workers else None

    def _counting(self, holders: Sequence[int]) -> BoundPlan:
        """Sums over all holders of a number for each tie, as a plan. Collective."""
        everyone = Partition((len(holders),), holders)
        ties = TensorSpace((len(self._ties),), everyone, axes=[COPIES])
        plan = self._backend.compile(all_reduce(ties))
        if self._backend.worker in holders:
            plan(np.zeros(len(self._ties)))
        return plan

    def begin(self) -> None:
        """Begin a step: put the gradients of earlier ones, which are added already, aside."""
        every = [p for tie in self._ties for p in tie.parameters]
        for reducer in dict.fromkeys(filter(None, map(reducer_of, every))):
            if reducer.enabled and reducer.unsummed:  # of no_sync() before
                reducer.reduce()
        self._before = [[_earlier(p) for p in tie.parameters] for tie in self._ties]
        for p in every:
            p.grad = None

    def fail(self, error: BaseException) -> None:
        """End the other workers' waits for this one, whose step failed."""
        for tie in self._ties:
            if tie.held and tie.sum is not None:
                bridge_of(tie.sum, self._backend).plan.fail(error)
        if self._used is not None:
            self._used.fail(error)

    def add(self) -> None:
        """Add the gradients of all holders; None where no holder has one. Collective over the
        workers of all groups."""
        if self._used is None or not any(tie.held for tie in self._ties):
            return
        mine = [any(p.grad is not None for p in tie.parameters) for tie in self._ties]
        used = self._used(np.array(mine, float))
        for tie, before, count in zip(self._ties, self._before, used, strict=True):
            if not tie.held:
                continue
            if not count:
                for p, was in zip(tie.parameters, before, strict=True):
                    p.grad = was.later if was.added is None else was.added
                    if was.added is not None:
                        _keep(p, was.later)
                continue
            sums: dict[str, Tensor] = {}
            for name, held in tie.held.items():
                grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in held]
                sums[name] = sum(grads[1:], grads[0])
            old = iter(before)
            for name, total in _summed(tie, sums, self._backend).items():
                for p in tie.held[name]:
                    was, summed = next(old), _is_summed(p)
                    p.grad = total.clone() if was.added is None else was.added + total
                    if summed:
                        p.grad._linop_is_summed = True  # type: ignore[attr-defined]
                    else:
                        _keep(p, was.later)


def _earlier(p: Tensor) -> _Earlier:
    """The gradients of a parameter before a step."""
    reducer = reducer_of(p)
    if reducer is None or reducer.enabled or p.grad is None:
        return _Earlier(p.grad, None)
    if _is_summed(p):
        return _Earlier(None, p.grad)
    return _Earlier(p.grad, reducer.aside(p))


def _keep(p: Tensor, later: Tensor | None) -> None:
    """Have the gradient of a parameter summed over its replicas, if it has some, by the next sum.

    Args:
        later: what is added to that sum.
    """
    reducer = reducer_of(p)
    if reducer is not None and not reducer.enabled:
        reducer.keep(p, later)


def _is_summed(p: Tensor) -> bool:
    """True if the gradient of a parameter of `DataParallel` is the sum of all replicas already, or
    would be."""
    reducer = reducer_of(p)
    if p.grad is None:
        return reducer is not None and reducer.enabled
    return bool(getattr(p.grad, "_linop_is_summed", False))


def _places(group: Sequence[str], holders: Mapping[_Place, _Holder]) -> list[_Place]:
    """The places of tied parameters, by key and stage.

    Raises:
        ArgumentError: there is none of a key.
    """
    found = []
    for key in group:
        some = sorted(place for place in holders if place[1] == key)
        if not some:
            raise ArgumentError(f"tied: {key!r} is no parameter of a stage")
        found += some
    return found


def in_several(names: Sequence[Sequence[str]], said: Sequence[Sequence[str]]) -> list[list[str]]:
    """Groups of tied parameters besides given ones: of each key that several stages have.

    Args:
        names: as in `TiedWeights`.
        said: such keys, by worker.
    """
    known = {key for group in names for key in group}
    every = dict.fromkeys(key for keys in said for key in keys)
    return [[key] for key in every if key not in known]


def check_shared(plan: Plan, modules: Sequence[Any], names: Sequence[Sequence[str]]) -> None:
    """Check parameters that several of the given stages contain: their workers' updates are to be
    those of one.

    Args:
        modules: stages; those of other workers may be None.
        names: as in `TiedWeights`.

    Raises:
        ArgumentError: such a parameter is on several workers and not in `names`, or updates do not
            come last.
    """
    found: dict[int, dict[str, int]] = {}
    several: set[int] = set()
    for s, module in enumerate(modules):
        keyed = keyed_parameters(module) if isinstance(module, torch.nn.Module) else {}
        firsts = {id(p): name for name, p in reversed(keyed.items())}
        for p, name in firsts.items():
            if p in found:
                several.add(p)
            found.setdefault(p, {})[prefix_of(s, module) + name] = plan.graph.place[s]
    for keys in (found[p] for p in found if p in several):
        if len(set(keys.values())) > 1 and not any(keys.keys() <= {*group} for group in names):
            raise ArgumentError(
                f"parameters {list(keys)} are one, and in stages of several workers: name them in "
                f"tied=[{list(keys)}], so that their gradients are added"
            )
        check_updates_last(plan, f"parameters {list(keys)}, which are one")


def _holders(one: Own, grid: Partition, keys: Collection[str]) -> dict[str, _Holder]:
    """A stage's parameters of some keys. Collective over its workers."""
    found: dict[str, _Holder] = {}
    if one.part.workers == 1:
        for name, p in keyed_parameters(one.module).items():
            if (key := one.prefix + name) in keys:
                space = TensorSpace(p.shape, Partition((1,), grid.workers), axes=[COPIES])
                found[key] = _Holder(space, p.dtype, digest(p), (_PROCESS, id(p)))
        return found
    workers = Workers("gather_state", one.module)
    order = sorted(grid.workers)
    for item in workers.tensors.values():
        if (key := one.prefix + item.key) not in keys or not item.trained:
            continue
        if not item.spaces:
            raise ArgumentError(
                f"{key!r} is held whole by each of the workers {order}; a parameter of a "
                f"layer of linop.layers expected"
            )
        if item.packing is not None:
            raise ArgumentError(
                f"{key!r} is a parameter of several parts (packed=), and is one with a parameter "
                f"of another stage; one without parts expected"
            )
        (whole,) = (collect(workers, [item], None) or {}).values()
        (own,) = item.spaces.values()
        at = own.partition
        there = Partition(at.shape, [order[worker] for worker in at.workers])
        bounds = dict(enumerate(own.bounds))
        space = TensorSpace(item.shape, there, axes=own.axes, bounds=bounds)
        found[key] = _Holder(space, item.dtype, digest(whole), None)
    return found


def _tie(
    group: Sequence[_Place],
    own: Mapping[_Place, Tensor],
    holders: Mapping[_Place, _Holder],
    plan: Plan,
    backend: Backend,
) -> _Tie:
    for place in group:
        first, one = holders[group[0]], holders[place]
        there, others = one.space.partition, first.space.partition
        if one.object is not None and one.object == first.object and there != others:
            raise ArgumentError(
                f"tied: {_words(place, group)} are one tensor in the memory of workers "
                f"{others.workers[0]} and {there.workers[0]}, which are threads; a copy for each "
                f"expected: give each copy.deepcopy(stages)"
            )
        if one.about != first.about:
            what = "values"
            if one.about[:2] != first.about[:2]:
                what = f"{one.about[:2]} and {first.about[:2]}"
            raise ArgumentError(f"tied: {_words(place, group)} are to be equal, and have {what}")
    dtype = numpy_dtype(holders[group[0]].dtype)
    places: dict[Any, list[_Place]] = {}  # one for equal blocks on equal workers
    for place in group:
        X = holders[place].space
        places.setdefault((X.partition, tuple(X.axes), X.bounds), []).append(place)
    spaces = [
        TensorSpace(
            holders[some[0]].space.global_shape,
            grid,
            dtype,
            axes,
            f"tie{n}",
            bounds=dict(enumerate(bounds)),
        )
        for n, ((grid, axes, bounds), some) in enumerate(places.items())
    ]
    held: dict[str, list[Tensor]] = {}
    for X, some in zip(spaces, places.values(), strict=True):
        here = list({id(own[place]): own[place] for place in some if place in own}.values())
        if here:
            held[X.region(plan.worker).name] = here
    if len(spaces) == 1:
        return _Tie(held, None)
    E = vstack(identity(spaces[0]), *(repartition(spaces[0], Y) for Y in spaces[1:]))
    tie = _Tie(held, E @ E.H)
    bridge_of(tie.sum, backend)  # compiling is collective over all workers
    if held:  # the first call binds the plan
        _summed(tie, {name: torch.zeros_like(own[0]) for name, own in held.items()}, backend)
    return tie


def _words(place: _Place, group: Sequence[_Place]) -> str:
    (first, key), (s, other) = group[0], place
    if key == other:
        return f"{key!r} of stage {s}, and of stage {first},"
    return f"{other!r} and {key!r}"


def _summed(tie: _Tie, grads: Mapping[str, Tensor], backend: Backend) -> Mapping[str, Tensor]:
    """Sums of this worker's gradients and all others', by region."""
    if tie.sum is None:
        return grads
    with torch.no_grad():
        if len(grads) > 1:
            found: Mapping[str, Tensor] = apply(tie.sum, dict(grads), backend)
            return found
        ((name, grad),) = grads.items()
        return {name: apply(tie.sum, grad, backend)}
