"""A stage of a pipeline on one worker: its forwards, backwards and updates, by torch's autograd.

A version of the parameters is a dict of leaves that share memory with them. An update of a stage
whose older versions are still needed moves the parameters to new memory first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.checkpoint import checkpoint

from linop.backends.autograd.recompute import checkpoint_context
from linop.errors import ArgumentError
from linop.schedules import Action, Kind
from linop.schedules.actions import COMPUTE
from linop.strategies.data.reducer import reducer_of
from linop.strategies.data.unit import shapes_only
from linop.strategies.pipelines.stages.halves import Part, input_half, weight_half
from linop.strategies.pipelines.stages.random_numbers import RandomNumbers
from linop.strategies.pipelines.stages.stateless import called, reading

Result = Any
"""Of a module: a tensor, or a tuple, list or mapping of several."""
Version = Mapping[str, Tensor]
Gradients = Mapping[int, Tensor] | None
"""Of outputs, by number; None for the loss."""
Roots = tuple[Sequence[GradientEdge], Sequence[Tensor]]
"""Nodes, and the gradients that come to them."""
_run = torch.autograd.Variable._execution_engine.run_backward
"""torch's engine, of nodes and their gradients: `torch.autograd.backward` first takes a fourth of a
small backward's time to check them."""


@dataclass
class _Saved:
    """Data that a forward leaves for its backward; the output itself is not kept."""

    inputs: Sequence[Tensor]
    edges: Mapping[int, GradientEdge]
    """Nodes of the graph that computed the outputs, or the loss; none of what requires no
    gradient."""
    weights: Version | None
    roots: Roots = ((), ())
    """Between the two halves of a backward."""
    parts: Sequence[Part] | None = None
    """Nodes at which the second half starts."""
    loss: Tensor | None = None

    def started(self, gradients: Gradients) -> Roots:
        """The nodes at which a backward begins."""
        if gradients is None:
            assert self.loss is not None
            return list(self.edges.values()), [torch.ones_like(self.loss)] * len(self.edges)
        used = [k for k in self.edges if k in gradients]
        return [self.edges[k] for k in used], [gradients[k] for k in used]


class Stage:
    """A module, and what is in flight of it.

    Args:
        index: of the stage.
        module: called with a tensor for each edge into the stage.
        row: the worker's actions; those of other stages are ignored.
        outputs: numbers of the outputs that others take; none for the last stage.
        recompute: True: forwards keep their inputs only, and are computed again in backward.
        halves: False: compute both halves of a backward in the first, as a stage on several workers
            has to: its messages are of both. One with sharded parameters always does.
        count: number of the stage's workers of which something is true, collective among them; None
            for one worker.
    """

    def __init__(
        self,
        index: int,
        module: Any,
        row: Sequence[Action],
        outputs: Sequence[int] = (),
        recompute: bool = False,
        halves: bool = True,
        count: Callable[[bool], int] | None = None,
    ) -> None:
        self.index = index
        self.module = module
        self._outputs = outputs
        self._recompute = recompute
        self._writes = False
        self.random = RandomNumbers(index, alone=halves)
        self._plan = _updates([a for a in row if a.stage == index])
        self._stashes = any(update.old for update in self._plan)
        self.parameters = list(module.parameters())  # they may be frozen and thawed between steps
        self._modules = tuple(module.modules())
        self.units = sharded_units(module)
        self._count = count
        self._halves = halves and not self.units  # the second half would be of whole parameters
        if self.units and self._stashes:
            raise ArgumentError(
                f"stage {index}: the schedule reads older versions of its parameters, which "
                f"fully_shard has sharded: it keeps no versions; DataParallel stages may have some"
            )
        self._saved: dict[int, _Saved] = {}
        self._versions: dict[int, Version] = {}
        self._updates = 0

    @property
    def modes(self) -> tuple[bool, ...]:
        """Training modes of all submodules, on which shapes of outputs may depend."""
        return tuple(m.training for m in self._modules)

    def begin(self) -> None:
        """Begin a step: versions count from 0."""
        self._saved, self._updates = {}, 0
        self.random.step += 1
        for unit in self.units:
            unit.forget()
        if self._stashes:
            self._versions = {0: self._leaves()}

    def _leaves(self) -> Version:
        return {
            name: p.data.requires_grad_(p.requires_grad)
            for name, p in self.module.named_parameters()
        }

    def forward(
        self, micro_batch: int, inputs: Sequence[Tensor], version: int = -1
    ) -> dict[int, Tensor]:
        """Outputs for one micro-batch that others take, by number, without graph. To be called with
        gradients enabled.

        Args:
            version: of the parameters; -1 for the newest.
        """
        weights = self._weights(version)
        outputs = self.checked(self._called(micro_batch, inputs, weights))
        self._save(micro_batch, inputs, outputs, weights)
        return {k: y.detach() for k, y in outputs.items()}

    def forward_loss(
        self,
        micro_batch: int,
        inputs: Sequence[Tensor],
        version: int,
        loss: Callable[[int, Result], Tensor],
    ) -> Tensor:
        """The loss for one micro-batch, without graph; see `forward`."""
        weights = self._weights(version)
        result = self._called(micro_batch, inputs, weights)
        parts = self.checked(result)
        value = loss(micro_batch, result)
        if not value.requires_grad and any(y.requires_grad for y in parts.values()):
            raise ArgumentError(
                f"Pipeline: a loss that depends on the output expected, given {value!r}, which has "
                f"no gradient: it was detached, or computed without gradients"
            )
        self._save(micro_batch, inputs, {0: value}, weights)
        plain = self._saved[micro_batch].loss = value.detach()
        return plain

    def _weights(self, version: int) -> Version | None:
        if not self._stashes:
            return None
        return self._versions[self._updates if version < 0 else version]

    def _save(
        self,
        micro_batch: int,
        inputs: Sequence[Tensor],
        results: Mapping[int, Tensor],
        weights: Version | None,
    ) -> None:
        """Keep what the backward needs."""
        edges = {k: get_gradient_edge(y) for k, y in results.items() if y.requires_grad}
        self._saved[micro_batch] = _Saved(inputs, edges, weights)

    def _called(
        self, micro_batch: int, inputs: Sequence[Tensor], weights: Version | None
    ) -> Result:
        plain = weights is None and not (self._recompute or self._writes)
        if plain and not self.random.draws(self.module.training):
            return self.module(*inputs)
        changed: Version = {}
        seeded = partial(self.random.of, self.module.training, micro_batch)

        def call(*inputs: Tensor) -> Result:
            if self._writes:  # a module that begins in place, as of its predecessor's output
                inputs = tuple(x.clone() for x in inputs)
            with seeded():
                # A second forward reads the buffers of the first, and leaves the module's alone.
                if weights is None and not changed:
                    return self.module(*inputs)
                given = {**(weights or {}), **{name: b.clone() for name, b in changed.items()}}
                return called(self.module, given, inputs)

        if not self._recompute:
            return call(*inputs)
        before = {name: b.clone() for name, b in self.module.named_buffers()}
        y = checkpoint(
            call,
            *inputs,
            use_reentrant=False,
            context_fn=checkpoint_context,
            preserve_rng_state=not self._halves,  # of torch's generator, which threads share
        )
        after = dict(self.module.named_buffers())
        # Norms change theirs without a new version: values are compared.
        changed = {name: b for name, b in before.items() if not torch.equal(b, after[name])}
        return y

    def evaluate(
        self, micro_batch: int, inputs: Sequence[Tensor]
    ) -> tuple[dict[int, Tensor], Result]:
        """Outputs, and the module's result, for the newest parameters, without graph."""
        with torch.no_grad(), self.random.of(self.module.training, f"evaluation {micro_batch}"):
            # Stages of one worker share a tensor that several take.
            own = [x.clone() for x in inputs] if self._writes else inputs
            result = self.module(*own)
        return self.checked(result), result

    def probe(self, inputs: Sequence[Tensor], meet: Callable[[], object]) -> dict[int, Tensor]:
        """Outputs for any values, which leaves neither the module's buffers nor random numbers
        changed.

        Args:
            meet: called when the module's messages are over, before errors of this worker alone.

        Raises:
            ArgumentError: one is no tensor, or of another shape the second time.
        """
        results = []
        for _ in range(2):
            own = {name: b.clone() for name, b in self.module.named_buffers()}
            with torch.no_grad(), shapes_only(), self.random.probing(self.module.training):
                again = [x.clone() for x in inputs]
                versions = [x._version for x in again]
                results.append(called(self.module, own, again))
            self._writes |= versions != [x._version for x in again]
            torch.clear_autocast_cache()  # casts of weights without graph, which a step would use
        meet()
        found = [self.checked(result) for result in results]
        shapes = [[(tuple(y.shape), y.dtype) for y in one.values()] for one in found]
        if shapes[0] != shapes[1]:
            raise ArgumentError(
                f"stage {self.index}: its module returns a tensor of {shapes[0]}, then one of "
                f"{shapes[1]} for the same input; one shape for all micro-batches of a size "
                f"expected"
            )
        return found[0]

    def checked(self, result: Result) -> dict[int, Tensor]:
        """The module's outputs that others take, by number; all of the last stage.

        Raises:
            ArgumentError: one is not there, or is no tensor with rows.
        """
        if type(result) is torch.Tensor and result.ndim and self._outputs in ([0], []):
            return {0: result}
        parts = dict(enumerate(_parts(result)))
        for k in self._outputs or parts or (0,):
            y = parts.get(k)
            if not isinstance(y, torch.Tensor) or not y.ndim:
                kind = "a tensor without dimensions" if k in parts else f"no output {k}"
                if k in parts and not isinstance(y, torch.Tensor):
                    kind = repr(type(y))
                raise ArgumentError(
                    f"stage {self.index}: its module returns {kind}; a tensor whose first "
                    f"dimension is that of the batch expected"
                )
        return {k: parts[k] for k in self._outputs or parts}

    def backward(self, micro_batch: int, gradients: Gradients) -> list[Tensor | None]:
        """Add the gradients of the parameters to their ``grad``; return those of the inputs, None
        for one on which the loss does not depend.

        Args:
            gradients: of the outputs, by number; None for the loss.
        """
        saved = self._saved.pop(micro_batch)
        edges, roots = saved.started(gradients)
        if edges:
            with self._reading(saved.weights):
                _run(tuple(edges), tuple(roots), False, False, (), True, accumulate_grad=True)
            if saved.weights is not None:
                self._collect(saved.weights)
        return self._gradients(saved.inputs)

    def backward_input(self, micro_batch: int, gradients: Gradients) -> list[Tensor | None]:
        """Gradients of the inputs alone, if halves are apart; `backward_weight` is to follow."""
        saved = self._saved[micro_batch]
        if not self._halves:
            found = self.backward(micro_batch, gradients)
            self._saved[micro_batch] = _Saved((), {}, None)
            return found
        saved.roots = saved.started(gradients)
        wanted = [x for x in saved.inputs if x.requires_grad]
        if saved.roots[0] and wanted:
            with self._reading(saved.weights):
                saved.parts = input_half(*saved.roots, wanted)
        return self._gradients(saved.inputs)

    def _gradients(self, inputs: Sequence[Tensor]) -> list[Tensor | None]:
        """Take the gradients of inputs: all workers of the stage have one of each, or none has, so
        that all run the backward of a stage before it, or none."""
        found = [_gradient(x) for x in inputs]
        for k, x in enumerate(inputs):
            if self._count is not None and x.requires_grad and self._count(found[k] is not None):
                found[k] = torch.zeros_like(x) if found[k] is None else found[k]
        return found

    def backward_weight(self, micro_batch: int) -> None:
        """Add the gradients of the parameters to their ``grad``."""
        saved = self._saved.pop(micro_batch)
        with self._reading(saved.weights):
            if saved.parts is not None:
                weight_half(saved.parts)
            elif saved.roots[0]:
                leaves = self.parameters if saved.weights is None else list(saved.weights.values())
                leaves = [leaf for leaf in leaves if leaf.requires_grad]
                if leaves:
                    torch.autograd.backward(*saved.roots, inputs=leaves)
        if saved.weights is not None:
            self._collect(saved.weights)

    def _reading(self, weights: Version | None) -> AbstractContextManager[Any]:
        """Context of a backward: the module has the weights of the forward, with which checkpoints
        inside of it compute again."""
        return nullcontext() if weights is None else reading(self.module, weights)

    def _collect(self, weights: Version) -> None:
        """Move the gradients of a version to the parameters."""
        for name, p in self.module.named_parameters():
            grad, weights[name].grad = weights[name].grad, None
            if grad is not None and p.grad is not None:
                p.grad += grad
            elif grad is not None:
                p.grad = grad

    # Sharded parameters

    def unshard(self) -> None:
        """Gather whole parameters until `reshard`. Collective over the workers of their axes."""
        for unit in self.units:
            unit.hold()

    def reshard(self) -> None:
        """Give whole parameters up."""
        for unit in self.units:
            unit.release()

    def reduce(self) -> None:
        """Sum the gradients since the last time over the workers. Collective."""
        for unit in self.units:
            unit.reduce()

    def fail(self, error: BaseException) -> None:
        """End the waits of the workers that share this stage's parameters, whose step failed."""
        for unit in self.units:
            unit.fail(error)

    def renew(self) -> None:
        """Before an update: sum what hooks of `DataParallel` have not seen, gradients of versions;
        and move the parameters to new memory, if their old version is needed."""
        if self._stashes:
            reducers = dict.fromkeys(map(reducer_of, self.parameters))
            for reducer in filter(None, reducers):
                if reducer.enabled:
                    reducer.reduce()
        if self._stashes and self._plan[self._updates].old:
            for p in self.parameters:
                if p.requires_grad:
                    p.data = p.detach().clone()

    def renewed(self) -> None:
        """After an update: a new version, and the end of those that no forward reads any more."""
        if self._stashes:
            self._versions[self._updates + 1] = self._leaves()
            wanted = self._plan[self._updates].wanted
            self._versions = {v: w for v, w in self._versions.items() if v in wanted}
        self._updates += 1


def sharded_units(module: Any) -> list[Any]:
    """The units of a module's sharded parameters."""
    return [unit for m in module.modules() for unit in getattr(m, "_linop_units", ())]


def _parts(result: Result) -> Sequence[Tensor]:
    if isinstance(result, torch.Tensor):
        return (result,)
    if isinstance(result, Mapping):
        return list(result.values())
    return result if isinstance(result, tuple | list) else [result]


def tensors_of(result: Result) -> list[Tensor]:
    """The tensors that a module returns."""
    return [x for x in _parts(result) if isinstance(x, torch.Tensor)]


def joined(results: list[Result]) -> Result:
    """The rows of several results of a module, as one."""
    first = results[0]
    if isinstance(first, Mapping):
        return {key: torch.cat([result[key] for result in results]) for key in first}
    if isinstance(first, tuple | list):
        return tuple(map(torch.cat, zip(*results, strict=True)))
    return torch.cat(results)


def _gradient(x: Tensor) -> Tensor | None:
    grad, x.grad = x.grad, None
    return grad


class _Update(NamedTuple):
    """Versions that an update of a stage has to keep."""

    old: bool
    """True if the version before it is read later."""
    wanted: Collection[int]
    """Versions that later forwards read, and the new one."""


def _updates(row: Sequence[Action]) -> list[_Update]:
    """The updates of a stage, by its actions."""
    newest, read_by = 0, {}
    last: dict[int, int] = {}
    last_forward: dict[int, int] = {}
    for k, action in enumerate(row):
        if action.kind == Kind.UPDATE:
            newest += 1
        elif action.kind == Kind.FORWARD:
            version = newest if action.version is None else action.version
            read_by[action.micro_batch] = version
            last[version] = last_forward[version] = k
        elif action.kind in COMPUTE:
            last[read_by[action.micro_batch]] = k
    positions = [k for k, action in enumerate(row) if action.kind == Kind.UPDATE]
    return [
        _Update(last.get(v, -1) > k, {v + 1, *(w for w, at in last_forward.items() if at > k)})
        for v, k in enumerate(positions)
    ]
