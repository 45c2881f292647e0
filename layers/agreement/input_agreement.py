"""Agreement of all workers on a layer's call: its arguments, its plans and its global tensors.

Each call sums an 8-byte digest of the arguments' metadata over all workers, and a number of what is
summed: one all-reduce of 16 bytes. A sum seen before hits the layer's cache; a new one triggers an
all-gather of the metadata. So a tensor of another shape on one worker is known to all before any
block is sent: it makes another global tensor, or is an error on every worker.

The sum stands before the layer's messages, and does not travel with them: these have the sizes of
one global tensor, a worker that is given another one sends none of them, and one that waits for no
message, as the root of a broadcast, would go on with results of the old tensor. So each has to hear
of each other one before it returns. Between ranks of one machine that takes a microsecond
(`linop.backends.mpi.shared_memory.board`), elsewhere the time of a plan.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal, NamedTuple, TypeVar
from weakref import WeakValueDictionary
from zlib import crc32

import numpy as np
import torch

from linop import backends
from linop.backends import Backend
from linop.backends.autograd.bridge import bridge_of
from linop.backends.autograd.recompute import in_checkpoint, run
from linop.backends.engine.worker import Board, Worker
from linop.backends.together.meeting import Meeting
from linop.backends.together.transport import MEET, Item
from linop.errors import ArgumentError, BackendError, LinopError
from linop.layers.agreement import tensor_messages  # noqa: F401  # so that torch's can be sent
from linop.layers.agreement.arguments import Said, compare_arguments
from linop.layers.agreement.metadata import CallMetadata
from linop.operators.collectives import all_reduce
from linop.operators.operator import LinearOperator
from linop.spaces.decomposition import COPIES
from linop.spaces.partition import Partition
from linop.spaces.tensor import TensorSpace

_LAYERS = "call layers"
_CACHE_SIZE = 4096
"""Entries of each cache of digests, for all layers together."""
Value = TypeVar("Value")


class Cache(dict[Any, Value]):
    """Values by key, of which `keep` evicts the oldest. A copy is empty: functions of a layer refer
    to it, and not to a copy of it.

    Args:
        most: number of entries.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def keep(self, key: Any, value: Value) -> Value:
        """Add an entry."""
        if key not in self and len(self) == self._most:
            del self[next(iter(self))]
        self[key] = value
        return value

    def __deepcopy__(self, memo: object) -> Cache[Value]:
        return Cache(self._most)


class LayerDescription(NamedTuple):
    """A worker's description of a layer, which is compared with the others'."""

    number: int
    """Position in the order of construction."""
    name: str
    """Name of its class."""
    where: str
    """Path in the network."""
    arguments: Said
    unfit: str = ""
    """Description of a parametrization that fails on blocks; empty if there is none."""


class InputAgreement(Meeting):
    """Agreement among all workers of a backend; one object for all layers."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._layers = 0
        self._calls = Cache[int](_CACHE_SIZE)
        self._digests = Cache[bytes | None](_CACHE_SIZE)
        self._operators: WeakValueDictionary[bytes, LinearOperator] = WeakValueDictionary()
        self.workers = backend.workers or 1
        self.shapes_are_fixed = False
        self._alone = self.workers == 1
        self.debug = backend.debug
        self._sum = self._new_sum()
        self._board: Board | Literal["unknown"] | None = "unknown"
        """The way of the sums; None: by a plan."""
        self._interruptions = 0
        """Interrupted runs that all workers know of."""
        self._failed = False
        """An exchange has raised an error since all workers last had one."""
        self._sure = 0
        """Number of layers at the last exchange of all workers."""
        self._unsure = range(0)
        """Numbers of the layers that were constructed around the last error that all caught: more
        by some workers than by others."""

    def __deepcopy__(self, memo: object) -> InputAgreement:
        return self

    def _new_sum(self) -> LinearOperator:
        """The sum over all workers of a digest, and of a number of what is summed."""
        return all_reduce(TensorSpace((2,), Partition((self.workers,)), np.int64, [COPIES], "call"))

    def new_number(self) -> int:
        """Number of a new layer; equal on all workers, which construct layers in the same order."""
        self._layers += 1
        return self._layers

    def total(self, layer: int, given: CallMetadata) -> int:
        """Sum over all workers of the digests of their calls (int64). Collective."""
        return self.total_of(self.code(layer, given))

    def code(self, layer: int, given: CallMetadata) -> int:
        """This worker's term of `total`: the digest of its call, an int64."""
        call = layer, given
        code = self._calls.get(call)
        if code is None:
            # The worker is in the digest: two that swap arguments would give the same sum.
            digest = hashlib.sha256(repr((self._backend.worker, call)).encode()).digest()
            code = self._calls.keep(call, int.from_bytes(digest[:8], "little", signed=True))
        return code

    def total_of(self, code: int) -> int:
        """`total` of a call by its `code`. Collective."""
        return self.sum(code, _LAYERS)

    def sum(self, number: int, doing: str) -> int:
        """Sum of an int64 over all workers, which may overflow. Collective.

        Args:
            doing: the activity, equal on all workers.

        Raises:
            BackendError: workers are in different activities; on every worker.
        """
        if self._alone:
            return number
        code = _code(doing)
        total, codes = self._sums(number, code, doing)
        if codes != self.workers * code:
            self.gather_objects(None, doing)  # all workers know, and it is an error on each
        return total

    def joint(self, own: str | None, followed: Sequence[str], doing: str) -> str | None:
        """The activity of all workers that have one, in which the others take part; None if nobody
        has one. Collective.

        Args:
            own: this worker's; None: it takes part in that of others.
            followed: activities that others can take part in; equal on all workers.
            doing: words for what it does here, of an error.

        Raises:
            BackendError: workers are in different activities, or in one that no other can take part
                in; on every worker.
        """
        some, codes = self._sums(*((0, 0) if own is None else (1, _code(own))), doing)
        if not some and not codes:
            return None
        for one in followed if own is None or some < self.workers else [own]:
            if codes == some * _code(one):
                return one
        self.gather_objects(None, doing)  # an error on each, as above
        raise AssertionError(doing)

    def _sums(self, number: int, code: int, doing: str) -> tuple[int, int]:
        """`summed`, which a checkpoint records."""
        if in_checkpoint():
            given = (torch.tensor([number, code]),)
            number, code = run(_Recorded(self, doing), given)[0].tolist()
            return number, code
        return self.summed(number, code, doing)

    def summed(self, number: int, code: int, doing: str) -> tuple[int, int]:
        """Sums over all workers of a number, and of the code of what they do; collective."""
        board = self._board
        if isinstance(board, str):
            assert isinstance(self._backend, Worker)
            board = self._board = self._backend.board(doing)
        if board is not None:
            return board.sum(number, code, doing)
        known = self._sum.kept.get(self._backend) is not None
        if self._failed or not known or not _runs(self._sum, self._backend):
            # So do the others, as at the first sum, which says what it is of; or they have caught
            # the error, too.
            self.gather_objects(None, doing)
        try:
            bridge, arrays = bridge_of(self._sum, self._backend), self._backend.arrays
            # 5 µs less than through tensors
            pair = arrays.put(np.array([number, code], np.int64))
            total, codes = arrays.fetched(bridge.plan(pair)).tolist()
        except LinopError:
            self._failed = True
            raise
        return total, codes

    def agree_on_call(
        self, layer: LayerDescription, given: CallMetadata, digests: Said
    ) -> tuple[int, list[CallMetadata], list[Said]]:
        """The number that the layer has from now on, all workers' metadata of a call, and their
        digests of values, by worker. Collective.

        Raises:
            BackendError: they call different layers, layers constructed with different arguments,
                in different modes, or with different options; on every worker.
        """
        said = self.gather_objects((layer, given, digests), "call", layer.where)
        number = self._compared("call", [made for made, _, _ in said])
        everybodys = [given for _, given, _ in said]
        each = zip(*(given.modes for given in everybodys), strict=True)
        for what, modes in zip(_MODES, each, strict=True):
            if len(set(modes)) > 1:
                off = [w for w, on in enumerate(modes) if not on]
                raise BackendError(
                    f"{layer.name}: {what} on some workers, and not on workers {off}; it has to be "
                    f"the same on all"
                )
        for worker, theirs in enumerate(everybodys):
            if theirs.options != everybodys[0].options:
                raise BackendError(
                    f"{layer.name}: called with {everybodys[0].options or 'nothing'} beside tensors"
                    f" on worker 0, and {theirs.options or 'nothing'} on worker {worker}; the same "
                    f"expected on all"
                )
        return number, everybodys, [digests for _, _, digests in said]

    def shared_operator(
        self,
        make: Callable[..., LinearOperator],
        arguments: Sequence[Any],
        options: Mapping[str, Any],
        about: str,
    ) -> LinearOperator | None:
        """The operator that `make` builds, or an equal one that a layer holds, with its plans; None
        if it leaves all blocks where they are. Collective.

        Args:
            make, arguments, options: the function, and its arguments.
            about: path of the layer, for the error of a worker that waits in vain.

        Operators are equal if the digests of their stages are, so layers of one shape share plans:
        of the 143 movements of a ResNet-18, 60 move nothing, and 33 of the others are distinct.
        """
        key = make, _key(arguments), _key(options)
        op: LinearOperator | None = None
        if key not in self._digests:
            op = make(*arguments, **options)
            self._digests.keep(key, None if op.movement().still else op.stages.digest)
        digest = self._digests[key]
        if digest is None:
            return None
        known = self._operators.get(digest)
        # References are weak, and collected at other times on other workers: a cached operator is
        # used if all workers still have it, with plans that no error has interrupted.
        has = known is not None and _runs(known, self._backend)
        if set(self.gather_objects((digest, has), "plan", about)) != {(digest, True)}:
            known = None
        if known is None:
            known = self._operators[digest] = op or make(*arguments, **options)
        return known

    def agree_on_construction(self, layer: LayerDescription, mine: Item) -> tuple[int, list[Item]]:
        """The number that a layer which is constructed has from now on, and all workers' messages,
        by worker. Collective.

        Raises:
            BackendError: they construct different layers, or with different arguments; on every
                worker.
        """
        said = self.gather_objects((layer, mine), "construct", layer.name)
        # After the error for other numbers, which all may catch, the next ones are equal again.
        self._layers = max(self._layers, *(made.number for made, _ in said))
        return self._compared("construct", [made for made, _ in said]), [one for _, one in said]

    def _compared(self, verb: str, said: Sequence[LayerDescription]) -> int:
        """The number of a layer. Of one that was constructed after an error it is the largest that
        it has anywhere: the order of these is the same on all workers, as that of others.

        Raises:
            LinopError: workers have different layers.
        """
        number = max(one.number for one in said)
        if all(one.number in self._unsure for one in said):
            said = [one._replace(number=number) for one in said]
        _compare_layers(verb, said)
        return number

    def gather_objects(self, mine: Item, doing: str = MEET, about: str = "") -> list[Item]:
        if self._alone:
            return [mine]
        assert isinstance(self._backend, Worker)
        had = self._backend.interruptions
        goes_on = not self._failed and had == self._interruptions
        goes_on = goes_on and _runs(self._sum, self._backend)
        message = mine, goes_on, self._layers
        try:
            said: list[Any] = self._backend.transport.gather_all(message, doing, about)
        except LinopError:
            self._failed = True
            raise
        most = max(layers for _, _, layers in said)
        if not all(goes_on for _, goes_on, _ in said):
            # After an error that all caught, which came between on some: the sum is a new one, and
            # the next layer has one number, on all.
            self._sum, self._interruptions, self._failed = self._new_sum(), had, False
            self._unsure, self._layers = range(self._sure + 1, most + 1), most
        self._sure = most
        return [one for one, _, _ in said]


class _Recorded(NamedTuple):
    """A sum as a checkpoint records it, in place of a bridge."""

    agreement: InputAgreement
    plan: str
    """The activity."""

    def run(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        number, code = tensors[0].tolist()
        return (torch.tensor(self.agreement.summed(number, code, self.plan)),)


def _runs(op: LinearOperator, backend: Backend) -> bool:
    """False if an error has interrupted a plan of an operator on this worker."""
    bridge = op.kept.get(backend)
    return bridge is None or not bridge.is_broken


@cache
def _code(doing: str) -> int:
    """Number of an activity, whose sum over all workers is exact."""
    return crc32(doing.encode())


def _key(value: Any) -> Any:
    """Hashable key of an operator's arguments."""
    if isinstance(value, TensorSpace):
        return value.made_from
    if isinstance(value, Mapping):
        return tuple((name, _key(item)) for name, item in value.items())
    return tuple(map(_key, value)) if isinstance(value, list | tuple) else value


def _compare_layers(verb: str, said: Sequence[LayerDescription]) -> None:
    first = {(one.number, one.name): w for w, one in reversed(list(enumerate(said)))}
    if len(first) > 1:
        each = ", ".join(
            f"worker {w} {verb}s {said[w].where} (layer {number})"
            for (number, _), w in first.items()
        )
        raise BackendError(
            f"workers {verb} different layers: {each}. Construct and call the same layers in the "
            f"same order on every worker"
        )
    for worker, one in enumerate(said):
        if one.unfit:
            raise ArgumentError(f"{one.name}: on worker {worker}: {one.unfit}")
    compare_arguments(said[0].name, [one.arguments for one in said])


_MODES = ("gradients are enabled", "the layer is in training mode", "autocast is enabled")


def agreement_of(backend: Backend) -> InputAgreement:
    """The `InputAgreement` of a backend, which is made at first use."""
    known: InputAgreement | None = backend.kept.get(InputAgreement)
    return known or backend.kept.setdefault(InputAgreement, InputAgreement(backend))


@contextmanager
def fixed_shapes(fixed: bool = True) -> Iterator[None]:
    """Context in which a layer's call skips the agreement of all workers if this one passes shapes,
    dtypes and modes that it passed before: the caller promises that the others then do the same.

    It saves an all-reduce of 16 bytes at every call, and the synchronisation by it. A batch that is
    smaller on all workers is new to all, and agreed upon as usual, provided that workers without a
    block pass zero-volume tensors of its batch size. If the promise is broken, workers wait for
    each other, to a `DeadlockError`. In debug mode there is no effect.

    Args:
        fixed: False restores the agreement inside of another such context.

    Example:
        >>> P, x = linop.Partition((2,)), torch.arange(4.0).chunk(2)
        >>> def main(backend):
        ...     total, calls = layers.Sum(P), lambda: sum(row.calls for row in backend.counters())
        ...     first = total(x[backend.worker]), calls()
        ...     with layers.fixed_shapes():
        ...         return *first, total(x[backend.worker]), calls()
        >>> y, plans, again, then = linop.launch(main, workers=2)[0]
        >>> y.item(), again.item(), plans, then - plans  # the sum, and an agreement; the sum alone
        (6.0, 6.0, 2, 1)
    """
    backend = program_backend()
    agreement = agreement_of(backend)
    before = agreement.shapes_are_fixed
    agreement.shapes_are_fixed = fixed and not backend.debug
    try:
        yield
    finally:
        agreement.shapes_are_fixed = before


def program_backend() -> Backend:
    """Backend of the program that layers constructed now belong to: that of `launch`, ``mpiexec``
    or `backends.use`; otherwise this process alone."""
    here = backends.current()
    return backends.alone() if here.worker is None else here
