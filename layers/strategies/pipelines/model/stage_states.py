"""The state of all stages in the form of the sequential model's, and back, bit for bit."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linop.backends import Backend
from linop.backends.autograd.dtypes import numpy_dtype
from linop.backends.autograd.functions import apply
from linop.errors import ArgumentError, ShapeError
from linop.layers.agreement.input_agreement import InputAgreement
from linop.layers.parameters.groups import Groups, groups_of
from linop.layers.state.state import gather_state, scatter_state
from linop.layers.state.state_tensors import state_tensors
from linop.operators.collectives import repartition
from linop.spaces.decomposition import COPIES
from linop.spaces.partition import Partition
from linop.spaces.tensor import TensorSpace
from linop.strategies.pipelines.splitting import keys_of_whole
from linop.strategies.pipelines.stages.stage_backends import within

_LOAD = "load_state_dict"
_LOADS = f"call linop.strategies.Pipeline.{_LOAD}"


def prefix_of(stage: int, module: Any) -> str:
    """The prefix of the names of a stage in the keys of the sequential model."""
    return f"{stage}." if keys_of_whole(module) is None else ""


class Own(NamedTuple):
    """A stage of this worker. Its keys are those of the sequential model: the one that `split` cut,
    or a Sequential of the stages."""

    backend: Backend
    """Of all workers."""

    module: Any
    prefix: str
    part: Backend
    """Of its workers."""

    @property
    def is_cut(self) -> bool:
        """True if several workers have blocks of it: those of the stage, or of pipelines side by
        side."""
        return self._groups.workers != 1

    @property
    def _groups(self) -> Groups:
        return groups_of(self.module.parameters(), self.part)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the whole tensors of its state, by key."""
        if self.is_cut:
            return {self.prefix + item.key: item.shape for item in state_tensors(self.module)}
        state = self.module.state_dict()
        return {self.prefix + key: tuple(value.shape) for key, value in state.items()}

    def state(self) -> dict[str, Tensor]:
        """Its whole state, on the first worker of each pipeline that has it; none on others.
        Collective over its workers."""
        root = root_of(self._groups, self.part)
        state = self._within(gather_state, root) or {} if self.is_cut else self.module.state_dict()
        return {self.prefix + key: value for key, value in state.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load its share of the sequential model's state. Collective over its workers."""
        mine = {key.removeprefix(self.prefix): state[key] for key in self.shapes()}
        if self.is_cut:
            self._within(scatter_state, mine)
        else:
            self.module.load_state_dict(mine)

    def _within(self, work: Callable[..., Any], *arguments: Any) -> Any:
        with within(self.part, self.backend):
            return work(self.module, *arguments)


def root_of(groups: Groups, part: Backend) -> int | None:
    """The worker that gathers a state for a pipeline; None if each does, of pipelines side by
    side."""
    return 0 if groups.workers == part.workers else None


def own(
    backend: Backend, modules: Mapping[int, Any], parts: Mapping[int, Backend]
) -> dict[int, Own]:
    """This worker's stages."""
    return {
        s: Own(backend, module, prefix_of(s, module), parts[s]) for s, module in modules.items()
    }


def gathered(
    backend: Backend, agreement: InputAgreement, stages: Mapping[int, Own]
) -> OrderedDict[str, Tensor]:
    """State of all stages, on every worker, in new tensors: of each worker one message of bytes.
    Collective.

    Raises:
        ArgumentError: a value is no tensor. BackendError: workers of a stage differ in what each
            holds whole. On every worker.
    """

    def work() -> dict[int, dict[str, Tensor]]:
        mine = {s: one.state() for s, one in stages.items()}
        for key, value in ((k, v) for state in mine.values() for k, v in state.items()):
            if not isinstance(value, torch.Tensor):
                raise ArgumentError(f"{key!r} is no tensor")
        return mine

    mine = agreement.each(work, "state_dict", "call linop.strategies.Pipeline.state_dict")
    keys = {s: list(state) for s, state in mine.items() if state}
    doing = "call linop.strategies.Pipeline.state_dict"
    said = agreement.gather_objects((keys, order_of(stages)), doing)
    flat = {key: value for state in mine.values() for key, value in state.items()}
    values = on_all(backend, agreement, flat)
    pairs = [(s, key) for theirs, _ in said for s, own in theirs.items() for key in own]
    return OrderedDict((key, values[key]) for key in in_order(pairs, [o for _, o in said]))


def order_of(stages: Mapping[int, Own]) -> Sequence[str]:
    """Keys of the model that `split` cut, in its order; none if the stages are of no such model."""
    return next((keys for one in stages.values() if (keys := keys_of_whole(one.module))), ())


def in_order(keys: Iterable[tuple[int, str]], orders: Iterable[Sequence[str]]) -> list[str]:
    """Keys in the order of the sequential model.

    Args:
        keys: with the stage of each, in the order of its module.
        orders: all workers' `order_of`: that of modules which were exported may be another than
            that of their stages.
    """
    whole = next((order for order in orders if order), ())
    place = {key: k for k, key in enumerate(whole)}
    found = sorted(keys, key=lambda pair: (place.get(pair[1], len(place)), pair[0]))
    return [key for _, key in found]


def on_all(
    backend: Backend, agreement: InputAgreement, mine: Mapping[Any, Tensor]
) -> dict[Any, Tensor]:
    """All workers' tensors by key, on every worker, in new memory: of each worker one message of
    bytes. Collective."""
    rows = [(key, tuple(value.shape), value.dtype) for key, value in mine.items()]
    values: dict[Any, Tensor] = {}
    for worker, kinds in enumerate(
        agreement.gather_objects(rows, "exchange tensors of linop.strategies.Pipeline")
    ):
        lengths = [torch.Size(shape).numel() * dtype.itemsize for _, shape, dtype in kinds]
        whole = torch.empty(0, dtype=torch.uint8)
        if sum(lengths):
            bytes_ = None
            if worker == backend.worker:
                flat = [_bytes(value) for value in mine.values()]
                bytes_ = torch.cat(flat).to(backend.arrays.device)
            X = TensorSpace((sum(lengths),), Partition((1,), (worker,)), numpy_dtype(torch.uint8))
            everyone = X.like(Partition((agreement.workers,)), [COPIES])
            with torch.no_grad():
                whole = apply(repartition(X, everyone), bytes_, backend)
        for (key, shape, dtype), part in zip(kinds, whole.split(lengths), strict=True):
            values[key] = part.clone().view(dtype).reshape(shape)
    return values


def load(agreement: InputAgreement, stages: Mapping[int, Own], state: Mapping[str, Tensor]) -> None:
    """Load the sequential model's state, which every worker has, and `check` has found right.
    Collective."""
    agreement.each(lambda: [one.load(state) for one in stages.values()], _LOAD, _LOADS)


def check(agreement: InputAgreement, stages: Mapping[int, Own], state: Any) -> None:
    """Check the sequential model's state. Collective.

    Raises:
        ArgumentError, ShapeError: names or shapes are not those of the model; on every worker.
    """
    _, said = agreement.together(partial(_fitting, stages, state), _LOAD, _LOADS)
    keys = {key for theirs in said for key in theirs}

    def known() -> None:
        unknown = [key for key in state if key not in keys]
        if unknown:
            raise ArgumentError(f"the model has no {unknown[:8]}")

    agreement.each(known, _LOAD, _LOADS)


def _fitting(stages: Mapping[int, Own], state: Mapping[str, Tensor]) -> tuple[None, list[str]]:
    """The keys of this worker's stages, whose tensors in the state have the shapes of theirs."""
    shapes = {key: shape for one in stages.values() for key, shape in one.shapes().items()}
    if not isinstance(state, Mapping):
        raise ArgumentError(f"a mapping from names to tensors expected, given {state!r}")
    for key, shape in shapes.items():
        if key not in state:
            raise ArgumentError(f"{key!r} is missing")
        value = state[key]
        if not isinstance(value, torch.Tensor) or value.is_meta:
            raise ArgumentError(f"{key!r}: a tensor with values expected, given {value!r}")
        if tuple(value.shape) != shape:
            raise ShapeError(f"{key!r} has shape {tuple(value.shape)}; {shape} expected")
    return None, list(shapes)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
