"""State of torch.optim's optimizers over distributed parameters, in the form of the sequential
optimizer's: tensors of a parameter's shape are split as the parameter is; numbers are equal on all
workers."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import replace
from itertools import count
from typing import Any

import torch

from linop.errors import ArgumentError, BackendError
from linop.layers.state.limits import Limits
from linop.layers.state.reading import loaded
from linop.layers.state.state import collect, source_of, spread
from linop.layers.state.state_tensors import StateTensor, state_tensors
from linop.layers.state.workers import Workers

Names = tuple[str, str]
"""Names of a parameter, and of a value that the optimizer keeps for it."""


class Optimized:
    """The optimizers of all workers. Collective.

    Args:
        workers: those of the model.
        optimizer: this worker's, over its parameters; None if it has none. A worker without
            parameters may also pass an optimizer over an empty tensor outside of the model. One
            with the attributes `optimizer` and `parts` is of blocks of its own of the parameters,
            which are those of the module `parts`.

    Attributes:
        groups: names of the parameters of each parameter group, in the model's order, which is the
            sequential optimizer's.
        hypers: the options of each group, as the learning rate.

    Raises:
        ArgumentError, BackendError: no worker has an optimizer; one has other parameters than the
            model's; or they differ. On every worker.
    """

    def __init__(self, workers: Workers, optimizer: Any) -> None:
        parts = getattr(optimizer, "parts", None)
        self.workers = workers
        self.optimizer = optimizer if parts is None else optimizer.optimizer
        self.tensors = workers.tensors
        if parts is not None:
            # They may be parts of blocks.
            outer = {key: item.spaces for key, item in workers.tensors.items()}
            self.tensors = workers.tensors | {
                item.key: replace(
                    item,
                    spaces={**outer[item.key], **item.spaces},
                    packing=workers.tensors[item.key].packing,
                )
                for item in state_tensors(parts)
            }
        self._own: list[list[str | None]] = workers.each(self._names)
        said = workers.gather_objects(None if self.optimizer is None else self._groups())
        known = [groups for groups in said if groups is not None]
        if not known:
            raise ArgumentError(f"{workers.what}: no worker passes an optimizer")
        if len({repr([hyper for hyper, _ in groups]) for groups in known}) > 1:
            workers.refuse("optimizers of different parameter groups, or with different options")
        self.hypers = [hyper for hyper, _ in known[0]]
        self.groups = []
        for lists in zip(*([keys for _, keys in groups] for groups in known), strict=True):
            together = set().union(*lists)
            self.groups.append([key for key in self.tensors if key in together])

    def _names(self) -> list[list[str | None]]:
        """Names of this worker's parameters, by group."""
        if self.optimizer is None:
            return []
        names: dict[int, str] = {}
        for key, item in self.tensors.items():
            if item.trained and item.block is not None:
                names.setdefault(id(item.block), key)
        own = []
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                if id(p) not in names and p.numel():
                    raise ArgumentError(
                        f"the optimizer has a parameter of shape {tuple(p.shape)} that is none of "
                        f"the model's"
                    )
            own.append([names.get(id(p)) for p in group["params"]])
        return own

    def _groups(self) -> list[tuple[dict[str, Any], list[str]]]:
        hypers = _options(self.optimizer.param_groups)
        names = [[name for name in group if name is not None] for group in self._own]
        return list(zip(hypers, names, strict=True))

    def kept(self) -> dict[Names, Any]:
        """State that the optimizers keep, by names: a `StateTensor`, or a number. Collective.

        Raises:
            ArgumentError: a value is neither of the parameter's shape nor a number, or missing on
                a worker. BackendError: numbers or dtypes differ. On every worker.
        """
        workers = self.workers
        mine = self._mine()
        said = workers.gather_objects(
            workers.each(lambda: {n: self._kind(n, mine[n]) for n in mine})
        )
        everyones = {names: kind for kinds in said for names, kind in kinds.items()}
        workers.each(lambda: self._complete(mine, everyones))
        order = {key: n for n, key in enumerate(self.tensors)}
        kept: dict[Names, Any] = {}
        for names in sorted(everyones, key=lambda names: order[names[0]]):
            key, name = names
            is_block, value = everyones[names]
            kinds = {repr(kinds[names]) for kinds in said if names in kinds}
            if len(kinds) > 1:
                workers.refuse(f"{name!r} of {key!r} differs between workers: {sorted(kinds)}")
            if is_block:
                block = mine.get(names)
                value = replace(self._beside(key, name), block=block, dtype=value)
            kept[names] = value
        return kept

    def _mine(self) -> dict[Names, Any]:
        """Values that this worker's optimizer keeps, by names."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return {
            (key, name): value
            for group, keys in zip(groups, self._own, strict=True)
            for p, key in zip(group["params"], keys, strict=True)
            if key is not None
            for name, value in self.optimizer.state.get(p, {}).items()
        }

    def _kind(self, names: Names, value: Any) -> tuple[bool, Any]:
        """(True, dtype) for a tensor that is split as the parameter; (False, value) for a number or
        a tensor without dimensions.

        Raises:
            ArgumentError: the tensor has another shape than this worker's block.
        """
        if not _is_tensor(value):
            return False, deepcopy(value)  # the next step changes the optimizer's
        block = self.tensors[names[0]].block
        assert block is not None
        if value.shape != block.shape:
            raise ArgumentError(
                f"the optimizer keeps {names[1]!r} of shape {tuple(value.shape)} for {names[0]!r} "
                f"of shape {tuple(block.shape)}; a number expected, or one tensor of that shape"
            )
        return True, value.dtype

    def _complete(self, mine: Mapping[Names, Any], everyones: Mapping[Names, Any]) -> None:
        for key, name in everyones:
            block = self.tensors[key].block
            if block is not None and block.numel() and (key, name) not in mine:
                raise ArgumentError(f"the optimizer keeps no {name!r} for {key!r}, as others do")

    def target(self, key: str, name: str, dtype: Any) -> StateTensor:
        """A `StateTensor` that is split as a parameter, with a new block, uninitialised."""
        item = self.tensors[key]
        block = None
        if item.block is not None:
            device = self.workers.device if item.block.is_meta else item.block.device
            block = torch.empty_like(item.block, dtype=dtype, device=device)
        return replace(self._beside(key, name), block=block, dtype=dtype)

    def _beside(self, key: str, name: str) -> StateTensor:
        """A tensor that the optimizer keeps for a parameter, without its block."""
        item = self.tensors[key]
        return StateTensor(f"{key}.{name}", item.spaces, None, packing=item.packing)

    def install(self, hypers: list[dict[str, Any]], kept: Mapping[Names, Any]) -> None:
        """Load this worker's share of a whole state.

        Args:
            hypers: what is in each group besides parameters.
            kept: numbers, and items that hold this worker's blocks.
        """
        self.check(hypers, kept)
        if self.optimizer is not None:
            self.optimizer.load_state_dict(self._share(hypers, kept))

    def check(self, hypers: list[dict[str, Any]], kept: Mapping[Names, Any]) -> None:
        """Load it into a copy, so that what torch refuses is found before anything is changed.

        Raises:
            errors of torch's `load_state_dict`, of any class.
        """
        if self.optimizer is not None:
            copy(self.optimizer).load_state_dict(self._share(hypers, kept))

    def _share(self, hypers: list[dict[str, Any]], kept: Mapping[Names, Any]) -> dict[str, Any]:
        mine = {n: v.block if isinstance(v, StateTensor) else v for n, v in kept.items()}
        return numbered(hypers, self._own, mine)


def check_options(optimized: Optimized) -> None:
    """Check that the options of all groups, which are equal on all workers, can be loaded again.

    Raises:
        ArgumentError: one is an object that a load would refuse, because its pickle could be code.
    """
    for hyper in optimized.hypers:
        for name, value in hyper.items():
            file = io.BytesIO()
            torch.save(value, file)
            file.seek(0)
            try:
                loaded(file, name, Limits(0))
            except (BackendError, pickle.UnpicklingError) as error:
                kind = f"{type(value).__module__}.{type(value).__name__}"
                raise ArgumentError(
                    f"{optimized.workers.what}: the optimizer's option {name!r} is of type {kind}, "
                    f"which could not be loaded again; a Python number, a string, a tensor or a "
                    f"list or dict of these expected"
                ) from error


def gather_optimizer_state(
    model: Any, optimizer: Any, worker: int | None = None
) -> dict[str, Any] | None:
    """The state of the sequential optimizer, as its `state_dict`. Collective.

    Parameters count in the model's order in each group, which is that of ``model.parameters()``.

    Args:
        model: the module of this worker.
        optimizer: of this worker's parameters; None where it has none.
        worker: which one gets the state; by default all.

    Returns:
        None on workers that do not get it.

    Raises:
        ArgumentError: no worker has an optimizer, or a value that it keeps is neither a number nor
            of a parameter's shape. BackendError: workers have different optimizers. All on every
            worker.

    Example:
        >>> P, x = linop.Partition((1, 2)), torch.tensor([[1.0, 2.0, 3.0, 4.0]])
        >>> def main(backend):
        ...     linear = layers.Linear(P, 4, 1, bias=False)
        ...     optimizer = torch.optim.SGD(linear.parameters(), lr=0.1, momentum=0.9)
        ...     linear(x.chunk(2, dim=1)[backend.worker]).sum().backward()
        ...     optimizer.step()
        ...     return layers.gather_optimizer_state(linear, optimizer)["state"]
        >>> linop.launch(main, workers=2)[0][0]["momentum_buffer"].tolist()  # the gradient, of both
        [[1.0, 2.0, 3.0, 4.0]]
    """
    workers = Workers("gather_optimizer_state", model, optimizer)
    workers.need_memory()
    return collect_optimizer(Optimized(workers, optimizer), worker)


def collect_optimizer(optimized: Optimized, worker: int | None) -> dict[str, Any] | None:
    """`gather_optimizer_state` for optimizers that are compared already. Collective."""
    kept = optimized.kept()
    items = [value for value in kept.values() if isinstance(value, StateTensor)]
    wholes = collect(optimized.workers, items, worker)
    if wholes is None:
        return None
    values = {n: wholes[v.key] if isinstance(v, StateTensor) else v for n, v in kept.items()}
    return numbered(optimized.hypers, optimized.groups, values)


def numbered(
    hypers: Sequence[Mapping[str, Any]],
    groups: Sequence[Sequence[str | None]],
    kept: Mapping[Names, Any],
) -> dict[str, Any]:
    """A state in the form of torch's optimizers, where parameters have numbers.

    Args:
        hypers: options of each group.
        groups: names of the parameters of each group; None for those outside of the model.
        kept: values by names.
    """
    by_key: dict[str | None, dict[str, Any]] = {}
    for (key, name), value in kept.items():
        by_key.setdefault(key, {})[name] = value
    numbers = count()
    each = [[(next(numbers), key) for key in keys] for keys in groups]
    return {
        "state": {n: by_key[key] for group in each for n, key in group if key in by_key},
        "param_groups": [
            {**hyper, "params": [n for n, _ in group]}
            for hyper, group in zip(hypers, each, strict=True)
        ],
    }


def scatter_optimizer_state(model: Any, optimizer: Any, state: Mapping[str, Any] | None) -> None:
    """Load the state of the sequential optimizer into the workers' optimizers. Collective.

    Args:
        model: the module of this worker.
        optimizer: of this worker's parameters; None where it has none.
        state: the sequential `state_dict`, on all workers, or on some, with None on others.

    Raises:
        ArgumentError, ShapeError: it does not fit. BackendError: workers have different optimizers,
            or none has the state. All on every worker.

    Example:
        >>> P, sgd = linop.Partition((1, 2)), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)
        >>> whole = sgd([torch.zeros(1, 4)]).state_dict()
        >>> whole["state"][0] = {"momentum_buffer": torch.arange(4.0).view(1, 4)}
        >>> def main(backend):
        ...     linear = layers.Linear(P, 4, 1, bias=False)
        ...     optimizer = sgd(linear.parameters())
        ...     layers.scatter_optimizer_state(linear, optimizer, whole)
        ...     return optimizer.state[linear.weight]["momentum_buffer"].tolist()
        >>> linop.launch(main, workers=2)
        [[[0.0, 1.0]], [[2.0, 3.0]]]
    """
    workers = Workers("scatter_optimizer_state", model, optimizer)
    workers.need_memory()
    optimized = Optimized(workers, optimizer)
    hypers, kept = staged_optimizer(optimized, state)
    workers.each(lambda: optimized.install(hypers, kept))


def staged_optimizer(
    optimized: Optimized, state: Mapping[str, Any] | None
) -> tuple[list[dict[str, Any]], dict[Names, Any]]:
    """This worker's share of the state of the sequential optimizer, in new memory, for `install`.
    Collective.
    """
    workers = optimized.workers
    named = workers.each(lambda: None if state is None else _named(optimized, state))
    tensors, said = None, None
    if named is not None:
        hypers, values = named
        tensors = {f"{k}.{n}": v for (k, n), v in values.items() if _is_tensor(v)}
        said = hypers, {n: v.dtype if _is_tensor(v) else deepcopy(v) for n, v in values.items()}
    known = [one for one in workers.gather_objects(said) if one is not None]
    if not known:
        workers.refuse("no worker has the state; pass it on one of them, or on all")
    hypers, kinds = known[0]
    kept = {
        (key, name): optimized.target(key, name, kind) if isinstance(kind, torch.dtype) else kind
        for (key, name), kind in kinds.items()
    }
    items = [value for value in kept.values() if isinstance(value, StateTensor)]
    spread(workers, items, tensors, source_of(workers, items, tensors))
    return hypers, kept


def _named(
    optimized: Optimized, state: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], dict[Names, Any]]:
    """Options of each group, and kept values by names instead of parameter numbers.

    Raises:
        ArgumentError: other groups than those of the optimizers.
    """
    groups = state["param_groups"]
    counts, wanted = [len(g["params"]) for g in groups], [len(keys) for keys in optimized.groups]
    if counts != wanted:
        raise ArgumentError(
            f"the state is of groups of {counts} parameters; the optimizer has {wanted}"
        )
    names = {
        number: key
        for group, keys in zip(groups, optimized.groups, strict=True)
        for number, key in zip(group["params"], keys, strict=True)
    }
    kept = {
        (names[number], name): value
        for number, values in state["state"].items()
        for name, value in values.items()
    }
    return _options(groups), kept


def _options(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies of the options of each group, without its parameters."""
    left = ("params", "param_names")
    return [{k: deepcopy(v) for k, v in group.items() if k not in left} for group in groups]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0
