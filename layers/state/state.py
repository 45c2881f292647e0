"""State of a distributed model in the form of the sequential one's: scattered to the workers'
blocks and gathered from them, bit for bit.

Elements of every dtype travel as integers of the same size, so that none is rounded.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from linop.backends import Backend
from linop.backends.autograd.dtypes import numpy_dtype
from linop.backends.autograd.functions import apply
from linop.backends.transports.transport import Item
from linop.errors import ArgumentError, BackendError, restated
from linop.layers.agreement.input_agreement import InputAgreement, agreement_of, program_backend
from linop.layers.layer import Layer, Tensor, worker_of
from linop.layers.state.state_tensors import StateTensor, fit, lost_on_meta, state_tensors
from linop.operators.collectives import repartition
from linop.spaces.decomposition import COPIES
from linop.spaces.partition import Partition
from linop.spaces.tensor import TensorSpace

_CARRIERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes that elements travel as, by size in bytes."""


class Workers:
    """All workers of a model, with this worker's blocks of its state. Collective.

    Args:
        what: name of the public function that uses it, for errors.

    Raises:
        BackendError: they have different models; on every worker.
    """

    def __init__(self, what: str, model: Any) -> None:
        layers = [module for module in model.modules() if isinstance(module, Layer)]
        self.what = what
        self.backend: Backend = layers[0].backend if layers else program_backend()
        self.worker = worker_of(self.backend)
        self.agreement: InputAgreement = agreement_of(self.backend)
        self.device = self.backend.arrays.device
        self.tensors = {item.key: item for item in state_tensors(model)}
        self._agree(lost_on_meta(model))

    def _agree(self, lost: list[str]) -> None:
        rows = [_described(item) for item in self.tensors.values()]
        # A triple, as a layer's call exchanges: a worker in one gets a message that it can compare.
        everybodys = self.gather_objects(("state", self.what, (rows, lost)))
        self._same_call(everybodys)
        said = [rows for *_, (rows, _) in everybodys]
        self._lost = [name for *_, (_, lost) in everybodys for name in lost]
        for worker, theirs in enumerate(said):
            # One error, about the first worker that differs from worker 0.
            for first, other in zip(said[0], theirs, strict=False):
                if first[:2] != other[:2]:
                    self.refuse(
                        f"worker 0 has {first[0]!r} where worker {worker} has {other[0]!r}, or in "
                        f"other blocks; one model expected on all"
                    )
            if len(theirs) != len(said[0]):
                self.refuse(f"worker {worker} has {len(theirs)} tensors, worker 0 {len(said[0])}")
        for key, *rows in zip(self.tensors, *said, strict=True):
            kinds = [kind for *_, kind, _ in rows if kind is not None]
            if len(set(kinds)) > 1:
                self.refuse(f"{key!r} is of {' and '.join(map(str, sorted(set(map(str, kinds)))))}")
            self.tensors[key].dtype = kinds[0]
        self._on_meta = [
            key for key, *rows in zip(self.tensors, *said, strict=True) if any(m for *_, m in rows)
        ]

    def gather_objects(self, mine: Item) -> list[Item]:
        """All workers' messages, by worker: small objects that pickle. Collective."""
        return self.agreement.gather_objects(mine, about=f"in {self.what}")

    def _same_call(self, said: Sequence[Any]) -> None:
        names = [s[1] if isinstance(s, tuple) and len(s) == 3 else "another" for s in said]
        for worker, name in enumerate(names):
            if name != names[0]:
                raise BackendError(
                    f"workers call different functions: worker 0 calls {names[0]}, worker {worker} "
                    f"{name}. Call the same on every worker, in the same order"
                )

    def refuse(self, words: str) -> None:
        """Raise a BackendError; all workers call it."""
        raise BackendError(f"{self.what}: {words}")

    def need_memory(self) -> None:
        """Check that all blocks have values.

        Raises:
            BackendError: a block is on the meta device, which holds none; on every worker.
        """
        if self._on_meta:
            self.refuse(f"{self._on_meta} on the meta device have no values; load a state first")

    def materialise(self) -> None:
        """Allocate memory for blocks on the meta device.

        Raises:
            BackendError: it cannot be allocated, or a buffer there is in no state; on every worker.
        """
        if self._lost:
            self.refuse(
                f"{sorted(set(self._lost))} on the meta device are in no state; make them with "
                f"model.to_empty(device={self.device!r}), and fill them, before"
            )
        if self._on_meta:
            self.each(self._materialise)

    def _materialise(self) -> None:
        for item in self.tensors.values():
            item.materialise(self.device)

    def each(self, work: Callable[[], Any]) -> Any:
        """Result of local work, which may fail on some workers. Collective.

        Raises:
            LinopError: it failed on a worker; on every worker.
        """
        result, problem = None, None
        try:
            result = work()
        except Exception as error:
            problem = error
        said = self.gather_objects(None if problem is None else restated(problem, str(problem)))
        for worker, told in enumerate(said):
            if told is not None:
                raise restated(told, f"{self.what}: on worker {worker}: {told}") from problem
        return result

    def same(self, items: Sequence[StateTensor]) -> None:
        """Check that tensors that each worker holds whole are equal on all. Collective.

        Raises:
            BackendError: they differ; on every worker.
        """
        whole = [item for item in items if item.space is None]
        said = self.gather_objects([_digest(item.block) for item in whole])
        for item, *digests in zip(whole, *said, strict=True):
            other = [w for w, digest in enumerate(digests) if digest != digests[0]]
            if other:
                self.refuse(
                    f"{item.key!r}, of which each worker has the whole, differs between workers 0 "
                    f"and {other[0]}; give all the same, or hold it in a linop.layers.Layer"
                )

    def gathered(self, item: StateTensor, worker: int | None) -> Tensor | None:
        """The global tensor, on one worker or on all; None on others. Collective."""
        mine = worker in (None, self.worker)
        if item.space is None:
            return item.block.detach().clone() if mine else None
        X = _carried(item.space, item.dtype)
        given = None if item.block is None else self._as_carrier(item.block)
        moved = self._moved(X, self._whole(X, worker), given)
        return moved.view(item.dtype) if mine else None

    def scattered(self, item: StateTensor, whole: Tensor | None, dtype: Any, root: int) -> None:
        """Copy the global tensor, which the root holds, into all blocks. Collective.

        Args:
            dtype: of the global tensor.
        """
        space = item.space
        if space is None:
            space = self._whole(TensorSpace(item.shape, Partition((1,)), axes=[COPIES]), None)
        Y = _carried(space, dtype)
        given = None if whole is None else self._as_carrier(whole)
        moved = self._moved(self._whole(Y, root), Y, given)
        if item.block is not None:
            item.block.detach().copy_(moved.view(dtype))

    def _as_carrier(self, tensor: Tensor) -> Tensor:
        return _as_carrier(tensor, self.backend.arrays.device)

    def _moved(self, X: TensorSpace, Y: TensorSpace, x: Tensor) -> Tensor:
        with torch.no_grad():
            return apply(repartition(X, Y), x, self.backend)

    def _whole(self, X: TensorSpace, worker: int | None) -> TensorSpace:
        """Space of the global tensor on one worker, or of copies on all."""
        everyone = range(self.agreement.workers)
        there = Partition((1,), [worker]) if worker is not None else Partition((len(everyone),))
        return X.like(there, [COPIES])


def scatter_state(model: Any, state: Mapping[str, Tensor] | None) -> None:
    """Load the state of a sequential model into the distributed one, as its `load_state_dict` does.
    Collective.

    Args:
        model: the module of this worker: layers of linop.layers, and others, which are taken as
            replicated on all workers.
        state: the sequential `state_dict`, on all workers, each of which takes its blocks; or on
            some, with None on others: then the first of them sends.

    Raises:
        ArgumentError: names are missing, or not those of the model; a value is no tensor.
        ShapeError: a tensor has another shape. BackendError: workers have different models, or
        none has the state. All on every worker.
    """
    workers = Workers("scatter_state", model)
    items = list(workers.tensors.values())
    source = source_of(workers, items, state)
    workers.materialise()
    spread(workers, items, state, source)


def gather_state(model: Any, worker: int | None = None) -> OrderedDict[str, Tensor] | None:
    """The state of the whole model, as the sequential one's `state_dict`. Collective.

    Args:
        model: the module of this worker.
        worker: which one gets it; by default all.

    Returns:
        New tensors by name; None on workers that do not get them.

    Raises:
        BackendError: workers have different models, or different values of tensors that each holds
            whole; on every worker.
    """
    workers = Workers("gather_state", model)
    workers.need_memory()
    return collect(workers, list(workers.tensors.values()), worker)


def collect(
    workers: Workers, items: Sequence[StateTensor], worker: int | None
) -> OrderedDict[str, Tensor] | None:
    """Global tensors of some items, by key, on one worker or on all; None on others. Collective."""
    if worker is not None and worker not in range(workers.agreement.workers):
        there = workers.agreement.workers
        raise ArgumentError(f"{workers.what}: worker {worker!r}; there are {there} workers")
    workers.same(items)
    state: OrderedDict[str, Tensor] = OrderedDict()
    for item in items:
        state[item.key] = workers.gathered(item, worker)
    return state if worker in (None, workers.worker) else None


class Source(NamedTuple):
    """Origin of a state that is scattered.

    Args:
        root: the worker that sends; None if all hold the state, and each takes its blocks.
        dtypes: of the state's tensors, by key.
    """

    root: int | None
    dtypes: dict[str, Any]


def source_of(
    workers: Workers, items: Sequence[StateTensor], state: Mapping[str, Tensor] | None
) -> Source:
    """Find the workers that hold the state, and check that it fits the items. Collective; no tensor
    is sent yet.

    Args:
        state: this worker's, or None.

    Raises:
        ArgumentError, ShapeError: the state does not fit. BackendError: no worker has one. All on
            every worker.
    """
    said = workers.gather_objects(workers.each(lambda: None if state is None else _kinds(state)))
    holders = [w for w, kinds in enumerate(said) if kinds is not None]
    if not holders:
        workers.refuse("no worker has the state; pass it on one of them, or on all")
    kinds = said[holders[0]]
    fit(workers.what, items, {key: shape for key, (shape, _) in kinds.items()})
    for item in items:
        if kinds[item.key][1] is None:
            name = kinds[item.key][0]
            raise ArgumentError(f"{workers.what}: {item.key!r} is a {name}; a tensor expected")
    same = all(other == kinds for other in said)
    return Source(None if same else holders[0], {key: kind for key, (_, kind) in kinds.items()})


def spread(
    workers: Workers,
    items: Sequence[StateTensor],
    state: Mapping[str, Tensor] | None,
    source: Source,
) -> None:
    """Copy the tensors of a state into the blocks of items. Collective, if a root sends."""
    if source.root is None:
        for item in items:
            if item.block is not None and state is not None:
                item.block.detach().copy_(state[item.key][item.of(workers.worker)])
        return
    for item in items:
        whole = state[item.key] if state is not None and workers.worker == source.root else None
        workers.scattered(item, whole, source.dtypes[item.key], source.root)


def _described(item: StateTensor) -> tuple[Any, ...]:
    where = tuple(item.block.shape) if item.space is None else item.space.digest
    if item.block is None:
        return item.key, where, None, False
    return item.key, where, item.block.dtype, item.block.is_meta


def _kinds(state: Any) -> dict[str, Any]:
    if not isinstance(state, Mapping):
        raise ArgumentError(f"{type(state).__name__} given; a state_dict expected")
    return {key: _kind(value) for key, value in state.items()}


def _kind(value: Any) -> tuple[Any, Any]:
    """Shape and dtype of a tensor; the name of its type and None for another value."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    return type(value).__name__, None


def _carried(space: TensorSpace, dtype: Any) -> TensorSpace:
    """The space with the dtype that elements of a given dtype travel as."""
    carrier = numpy_dtype(_CARRIERS.get(dtype.itemsize, dtype))
    bounds = dict(enumerate(space.bounds))
    return TensorSpace(
        space.global_shape, space.partition, carrier, space.axes, space.name, bounds=bounds
    )


def _as_carrier(tensor: Tensor, device: str = "cpu") -> Tensor:
    plain = tensor.detach().to(device).resolve_conj().resolve_neg()
    return plain.view(_CARRIERS.get(plain.dtype.itemsize, plain.dtype))


def _digest(tensor: Tensor) -> bytes:
    # Of the bits: NaN is equal to itself.
    return hashlib.sha256(_as_carrier(tensor).numpy().tobytes()).digest()
