"""A pipeline's model and optimizer in one file, as `linop.layers.save` writes those of the
sequential model: pipelines of other stages, on other workers, can load it, and so can one process.

The optimizers of the workers of a row are those of its stages as one model; their states are put
together by the keys of the sequential model.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linop.backends import Backend
from linop.errors import ArgumentError, BackendError
from linop.layers.agreement.input_agreement import InputAgreement
from linop.layers.state.checkpoint import has_optimizer, read_state, write_state
from linop.layers.state.limits import Limits
from linop.layers.state.optimizer_state import (
    Names,
    Optimized,
    check_options,
    numbered,
    staged_optimizer,
)
from linop.layers.state.reading import loaded, named
from linop.layers.state.state import collect
from linop.layers.state.state_tensors import MODEL, OPTIMIZER, StateTensor
from linop.layers.state.workers import Workers
from linop.strategies.pipelines.model.stage_states import (
    Own,
    check,
    gathered,
    in_order,
    load,
    on_all,
    order_of,
    root_of,
)
from linop.strategies.pipelines.side_by_side import SideBySide
from linop.strategies.pipelines.stages.stage_backends import within


class Said(NamedTuple):
    """The optimizers of a row, in words that others put together."""

    hypers: list[dict[str, Any]]
    """Options of each group."""
    groups: list[list[tuple[int, str]]]
    """Stage and key of each group's parameters, in the row's order."""
    kept: dict[Names, Any]
    """Values that are no tensors."""
    order: Sequence[str]
    """As of `order_of`."""


class Checkpoints:
    """Save and load a pipeline. All methods are collective.

    Args:
        stages: of this worker.
        optimizer: of its parameters; None if the pipeline has none.
        copies: keys of tied parameters that another one of their group precedes, with its key.
        across: of pipelines side by side.
    """

    def __init__(
        self,
        backend: Backend,
        agreement: InputAgreement,
        stages: Mapping[int, Own],
        optimizer: Any,
        copies: Mapping[str, str],
        across: SideBySide,
    ) -> None:
        self._across = across
        self._backend, self._agreement = backend, agreement
        self._stages, self._optimizer, self._copies = stages, optimizer, copies
        self._model = torch.nn.ModuleDict({str(s): one.module for s, one in stages.items()})

    def save(self, path: Any) -> None:
        """Worker 0 writes a file."""
        with self._across.agreed("save"):
            pass
        state: Any = gathered(self._backend, self._agreement, self._stages)
        if self._optimizer is not None:
            state = {MODEL: state, OPTIMIZER: self._optimizer_state()}
        self._each(
            lambda: write_state(state, named(path)) if self._backend.worker == 0 else None, "save"
        )

    def load(self, path: Any) -> None:
        """Worker 0 reads the file."""
        with self._across.agreed("load"):
            state = self._read(path)
        install = None if self._optimizer is None else self._staged(state[OPTIMIZER])
        load(self._agreement, self._stages, state[MODEL])
        if install is not None:
            self._each(install, "load")

    def _read(self, path: Any) -> Mapping[str, Any]:
        """The states in a file, of which that of the model is right."""

        each = [math.prod(s) for one in self._stages.values() for s in one.shapes().values()]
        wanted = _LARGEST * sum(self._agreement.gather_objects(sum(each), _CALL.format("load")))

        def read() -> dict[str, Tensor]:
            if self._backend.worker:
                return {}
            file = io.BytesIO()
            torch.save(read_state(named(path), wanted), file)
            return {"file": torch.frombuffer(file.getbuffer(), dtype=torch.uint8)}

        data = on_all(self._backend, self._agreement, self._each(read, "load"))["file"]
        state = loaded(io.BytesIO(data.numpy().data), str(path), Limits(wanted))
        both = has_optimizer(state)
        if self._optimizer is not None and not both:
            raise ArgumentError(f"load: {str(path)!r} has no state of an optimizer")
        check(self._agreement, self._stages, state[MODEL] if both else state)
        return state if both else {MODEL: state}

    def _each(self, work: Callable[[], Any], what: str) -> Any:
        return self._agreement.each(work, what, _CALL.format(what))

    def _key(self, row_key: str) -> tuple[int, str]:
        """Stage, and key in the sequential state, of a key in the row's model."""
        s, _, name = row_key.partition(".")
        return int(s), self._stages[int(s)].prefix + name

    def _within(self) -> AbstractContextManager[None]:
        return within(next(iter(self._stages.values())).part, self._backend)

    def _optimized(self) -> Optimized | None:
        """The optimizers of this worker's row. Collective over its workers."""
        if not self._stages:
            return None
        with self._within():
            return Optimized(Workers("Pipeline", self._model), self._optimizer)

    def _groups(self, said: Collection[Said]) -> list[list[str]]:
        """Keys of each group of the sequential optimizer.

        Raises:
            BackendError: rows have other groups, or options.
        """
        hypers = [one.hypers for one in said]
        if any(repr(one) != repr(hypers[0]) for one in hypers):
            raise BackendError(
                "Pipeline: optimizers of different parameter groups, or with different options"
            )
        groups = []
        for each in zip(*(one.groups for one in said), strict=True):
            pairs = [pair for group in each for pair in group]
            every = in_order(pairs, [one.order for one in said])
            # Tied parameters are one, at the place of the first.
            groups.append(list(dict.fromkeys(self._copies.get(key, key) for key in every)))
        return groups

    def _said(
        self, optimized: Optimized | None, kept: Mapping[Names, Any]
    ) -> tuple[list[Said], list[list[str]]]:
        mine = None
        if optimized is not None:
            groups = [[self._key(key) for key in group] for group in optimized.groups]
            mine = Said(optimized.hypers, groups, dict(kept), order_of(self._stages))
        every = self._agreement.gather_objects(mine, _CALL.format("save or load"))
        said = [one for one in every if one is not None]
        return said, self._groups(said)

    def _optimizer_state(self) -> dict[str, Any]:
        """State of the sequential optimizer, on every worker."""

        def collected() -> tuple[Any, dict[Names, Any], dict[Names, Tensor]]:
            optimized = self._optimized()
            if optimized is None:
                return None, {}, {}
            with self._within():
                check_options(optimized)
                kept = optimized.kept()
                items = {n: v for n, v in kept.items() if isinstance(v, StateTensor)}
                part = next(iter(self._stages.values())).part
                root = root_of(optimized.workers.groups, part)
                wholes: Mapping[str, Tensor] = (
                    collect(optimized.workers, list(items.values()), root) or {}
                )
            named = {self._names(n): wholes[v.key] for n, v in items.items() if v.key in wholes}
            plain = {self._names(n): v for n, v in kept.items() if n not in items}
            return optimized, plain, named

        optimized, plain, tensors = self._each(collected, "save")
        values = on_all(self._backend, self._agreement, tensors)
        said, groups = self._said(optimized, plain)
        for one in said:
            values |= one.kept
        return numbered(said[0].hypers, groups, values)

    def _names(self, names: Names) -> Names:
        return self._key(names[0])[1], names[1]

    def _staged(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """Function that loads this worker's share of the sequential optimizer's state, which is
        checked."""
        optimized = self._each(self._optimized, "load")
        _, groups = self._said(optimized, {})
        counts = self._each(lambda: [len(g["params"]) for g in state["param_groups"]], "load")
        given, wanted = state["param_groups"], [len(keys) for keys in groups]
        if counts != wanted:
            raise ArgumentError(
                f"load: the state is of groups of {counts} parameters; the optimizer has {wanted}"
            )
        numbers = {
            key: n
            for group, keys in zip(given, groups, strict=True)
            for n, key in zip(group["params"], keys, strict=True)
        }

        def staged() -> Callable[[], None]:
            if optimized is None:
                return lambda: None
            values: dict[Names, Any] = {}
            for row_key in (key for group in optimized.groups for key in group):
                key = self._key(row_key)[1]
                number = numbers[self._copies.get(key, key)]
                for name, value in state["state"].get(number, {}).items():
                    values[row_key, name] = value
            mine = numbered(
                [{k: v for k, v in group.items() if k != "params"} for group in given],
                optimized.groups,
                values,
            )
            with self._within():
                hypers, kept = staged_optimizer(optimized, mine)
            optimized.check(hypers, kept)
            return lambda: optimized.install(hypers, kept)

        found: Callable[[], None] = self._each(staged, "load")
        return found


_LARGEST = 8
"""Bytes of the elements of most dtypes, at most."""
_CALL = "call linop.strategies.Pipeline.{}"
