"""A stage of a pipeline on one worker: its forwards, backwards and updates, by torch's autograd.

Backwards may read older versions of the parameters than the newest
(`linop.strategies.pipelines.stages.versions`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.checkpoint import checkpoint

from linop.backends.autograd.recompute import checkpoint_context
from linop.errors import ArgumentError
from linop.schedules import Action
from linop.strategies.data.shapes_only import shapes_only
from linop.strategies.pipelines.forms import (
    ALL,
    PLAIN,
    TENSOR,
    Form,
    Layout,
    Leaf,
    Output,
    arguments,
    chosen,
    described,
    form_of,
    tensors_in,
)
from linop.strategies.pipelines.stages.halves import Part, input_half, weight_half
from linop.strategies.pipelines.stages.random_numbers import RandomNumbers
from linop.strategies.pipelines.stages.stateless import called, reading
from linop.strategies.pipelines.stages.versions import Version, Versions

Result = Any
"""Of a module: a tensor, or a value that has some (`linop.strategies.pipelines.forms`)."""
Gradients = Mapping[Leaf, Tensor] | None
"""Of tensors of outputs; None for the loss."""
Roots = tuple[Sequence[GradientEdge], Sequence[Tensor]]
"""Nodes, and the gradients that come to them."""
_run = torch.autograd.Variable._execution_engine.run_backward
"""torch's engine, of nodes and their gradients: `torch.autograd.backward` first takes a fourth of a
small backward's time to check them."""


@dataclass(slots=True)
class _Saved:
    """Data that a forward leaves for its backward; the output itself is not kept."""

    inputs: Sequence[Tensor]
    edges: Mapping[Leaf, GradientEdge]
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
        module: called with what comes along the edges into the stage.
        row: the worker's actions; those of other stages are ignored.
        outputs: those that others take; none for the last stage.
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
        outputs: Sequence[Output] = (),
        recompute: bool = False,
        halves: bool = True,
        count: Callable[[bool], int] | None = None,
    ) -> None:
        self.index = index
        self.module = module
        self._outputs = outputs
        one = len(outputs) == 1 and outputs[0] in (0, ALL)
        self._single = {outputs[0]: TENSOR} if one else None
        """Outputs, if they are one tensor; or several, each by its number."""
        numbers = bool(outputs) and all(k != ALL and isinstance(k, int) for k in outputs)
        self._numbered = dict.fromkeys(outputs, TENSOR) if numbers else None
        self.layouts: Mapping[int, Layout] = {}
        """Of micro-batches: those of others have tensors by position."""
        self._recompute = recompute
        self._writes = False
        self.random = RandomNumbers(index, alone=halves)
        self._versions = Versions(module, [a for a in row if a.stage == index])
        self.parameters = list(module.parameters())  # they may be frozen and thawed between steps
        self._modules = tuple(module.modules())
        self.units = sharded_units(module)
        self._count = count
        # A forward that runs twice would write to buffers twice; of one that is checkpointed, both
        # would keep tensors.
        self._is_pure = not recompute and not any(True for _ in module.buffers())
        self._halves = halves and not self.units  # the second half would be of whole parameters
        if self.units and self._versions.any:
            raise ArgumentError(
                f"stage {index}: the schedule reads older versions of its parameters, which "
                f"fully_shard has sharded: it keeps no versions; DataParallel stages may have some"
            )
        self._saved: dict[int, _Saved] = {}

    @property
    def modes(self) -> tuple[bool, ...]:
        """Training modes of all submodules, on which shapes of outputs may depend."""
        return tuple([m.training for m in self._modules])

    def begin(self) -> None:
        """Begin a step: versions count from 0."""
        self._saved = {}
        self.random.step += 1
        for unit in self.units:
            unit.forget()
        self._versions.begin()

    def forward(
        self, micro_batch: int, inputs: Sequence[Tensor], version: int = -1
    ) -> dict[Leaf, Tensor]:
        """Tensors for one micro-batch that others take, without graph. To be called with gradients
        enabled.

        Args:
            version: of the parameters; -1 for the newest.
        """
        weights = self._versions.of(version)
        outputs = self._sent(micro_batch, self._called(micro_batch, inputs, weights))
        self._save(micro_batch, inputs, outputs, weights)
        return {k: y.detach() for k, y in outputs.items()}

    def _sent(self, micro_batch: int, result: Result) -> dict[Leaf, Tensor]:
        """Tensors of a micro-batch's outputs.

        Raises:
            ArgumentError: they have another structure than the other workers expect.
        """
        forms, found = self.checked(result)
        wanted = self.layouts.get(micro_batch, PLAIN).outputs
        if forms is wanted or wanted is None or forms == wanted:
            return found
        each = [{k: described(form) for k, form in one.items()} for one in (forms, wanted)]
        raise ArgumentError(
            f"stage {self.index}: its module returns {each[0]} for micro-batch {micro_batch}, and "
            f"returned {each[1]} for zeros of the same shapes; one structure, with the same "
            f"constants, for all values of the input expected: {ALL} stands for the whole result"
        )

    def forward_loss(
        self,
        micro_batch: int,
        inputs: Sequence[Tensor],
        version: int,
        loss: Callable[[int, Result], Tensor],
    ) -> Tensor:
        """The loss for one micro-batch, without graph; see `forward`."""
        weights = self._versions.of(version)
        result = self._called(micro_batch, inputs, weights)
        if type(result) is not torch.Tensor or self._outputs:
            self.checked(result)
        value = loss(micro_batch, result)
        if not value.requires_grad and any(y.requires_grad for y in tensors_in(result)):
            raise ArgumentError(
                f"Pipeline: a loss that depends on the output expected, given {value!r}, which has "
                f"no gradient: it was detached, or computed without gradients"
            )
        plain = value.detach()
        edges: dict[Leaf, GradientEdge] = {(0, 0): _edge(value)} if value.requires_grad else {}
        self._saved[micro_batch] = _Saved(inputs, edges, weights, loss=plain)
        return plain

    def _save(
        self,
        micro_batch: int,
        inputs: Sequence[Tensor],
        results: Mapping[Leaf, Tensor],
        weights: Version | None,
    ) -> None:
        """Keep what the backward needs."""
        edges = {k: _edge(y) for k, y in results.items() if y.requires_grad}
        self._saved[micro_batch] = _Saved(inputs, edges, weights)

    def _called(
        self, micro_batch: int, inputs: Sequence[Tensor], weights: Version | None
    ) -> Result:
        form = self.layouts.get(micro_batch, PLAIN).arguments
        training, random = self.module.training, self.random
        plain = weights is None and not (self._recompute or self._writes)
        if plain and not random.draws(training):
            return self.module(*inputs) if form is None else self._applied(form, inputs)
        changed: Version = {}

        def applied(inputs: Sequence[Tensor]) -> Result:
            if self._writes:  # a module that begins in place, as of its predecessor's output
                inputs = tuple(x.clone() for x in inputs)
            # A second forward reads the buffers of the first, and leaves the module's alone.
            if weights is None and not changed:
                return self._applied(form, inputs)
            given = {**(weights or {}), **{name: b.clone() for name, b in changed.items()}}
            return called(self.module, given, *arguments(form, inputs))

        def call(*inputs: Tensor) -> Result:
            return random.run(training, micro_batch, partial(applied, inputs), self._is_pure)

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

    def _applied(self, form: Form | None, inputs: Sequence[Tensor]) -> Result:
        """The module's result for its inputs."""
        if form is None:
            return self.module(*inputs)
        positional, named = arguments(form, inputs)
        return self.module(*positional, **named)

    def evaluate(
        self, micro_batch: int, inputs: Sequence[Tensor]
    ) -> tuple[dict[Leaf, Tensor], Result]:
        """Tensors of outputs, and the module's result, for the newest parameters, without graph."""
        form, what = self.layouts.get(micro_batch, PLAIN).arguments, f"evaluation {micro_batch}"

        def call() -> Result:
            # Stages of one worker share a tensor that several take.
            own = [x.clone() for x in inputs] if self._writes else inputs
            return self._applied(form, own)

        with torch.no_grad():
            result = self.random.run(self.module.training, what, call, self._is_pure)
        return self._sent(micro_batch, result), result

    def probe(
        self, form: Form | None, inputs: Sequence[Tensor], meet: Callable[[], object]
    ) -> tuple[Mapping[Output, Form], dict[Leaf, Tensor]]:
        """Forms of outputs, and their tensors, for any values, which leaves neither the module's
        buffers nor random numbers changed.

        Args:
            form: of the module's arguments; None: the inputs, by position.
            meet: called when the module's messages are over, before errors of this worker alone.

        Raises:
            ArgumentError: one cannot be sent, or is of another shape the second time.
        """
        results = []
        for _ in range(2):
            own = {name: b.clone() for name, b in self.module.named_buffers()}
            with torch.no_grad(), shapes_only(), self.random.probing():
                again = [x.clone() for x in inputs]
                versions = [x._version for x in again]
                results.append(called(self.module, own, *arguments(form, again)))
            self._writes |= versions != [x._version for x in again]
            torch.clear_autocast_cache()  # casts of weights without graph, which a step would use
        meet()
        found = [self.checked(result) for result in results]
        about = [
            [(tuple(y.shape), y.dtype) for y in tensors.values()] + [*forms.values()]
            for forms, tensors in found
        ]
        shapes = [one[: len(tensors)] for one, (_, tensors) in zip(about, found, strict=True)]
        if shapes[0] != shapes[1]:
            raise ArgumentError(
                f"stage {self.index}: its module returns a tensor of {shapes[0]}, then one of "
                f"{shapes[1]} for the same input; one shape for all micro-batches of a size "
                f"expected"
            )
        if about[0] != about[1]:
            raise ArgumentError(
                f"stage {self.index}: its module returns values of two structures for the same "
                f"input, {about[0][len(shapes[0]) :]} and {about[1][len(shapes[1]) :]}"
            )
        return found[0]

    def checked(self, result: Result) -> tuple[Mapping[Output, Form], dict[Leaf, Tensor]]:
        """Forms of the module's outputs that others take, and their tensors.

        Raises:
            ArgumentError: one is not there, or cannot be sent; the last stage returns no tensor.
        """
        if type(result) is torch.Tensor and self._single is not None:
            (output,) = self._single
            return self._single, {(output, 0): result}
        if type(result) is tuple and self._numbered is not None:
            plain: dict[Output, Tensor] = {
                k: x for k, x in enumerate(result) if type(x) is torch.Tensor
            }
            if self._numbered.keys() <= plain.keys():
                return self._numbered, {(k, 0): plain[k] for k in self._numbered}
        forms: dict[Output, Form] = {}
        found: dict[Leaf, Tensor] = {}
        for k in self._outputs:
            tensors: list[Tensor] = []
            try:
                forms[k] = form_of(chosen(result, k), tensors, "" if k == ALL else f"output {k}")
            except KeyError:
                raise self._unfit(f"no output {k!r}") from None
            except ArgumentError as error:
                raise self._unfit(f"what cannot be sent: {error}") from None
            found |= {(k, n): x for n, x in enumerate(tensors)}
        if not (found if self._outputs else tensors_in(result)):
            raise self._unfit(repr(type(result)))
        return forms, found

    def _unfit(self, what: str) -> ArgumentError:
        return ArgumentError(
            f"stage {self.index}: its module returns {what}; a tensor expected, or a tuple, list, "
            f"mapping or data class of tensors"
        )

    def backward(self, micro_batch: int, gradients: Gradients) -> list[Tensor | None]:
        """Add the gradients of the parameters to their ``grad``; return those of the inputs, None
        for one on which the loss does not depend.

        Args:
            gradients: of tensors of the outputs; None for the loss.
        """
        saved = self._saved.pop(micro_batch)
        edges, roots = saved.started(gradients)
        if edges:
            with self._reading(saved.weights):
                _run(tuple(edges), tuple(roots), False, False, (), True, accumulate_grad=True)
            if saved.weights is not None:
                self._versions.collect(saved.weights)
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
        if self._count is not None:
            for k, x in enumerate(inputs):
                if x.requires_grad and self._count(found[k] is not None):
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
            self._versions.collect(saved.weights)

    def _reading(self, weights: Version | None) -> AbstractContextManager[Any]:
        """Context of a backward: the module has the weights of the forward, with which checkpoints
        inside of it compute again."""
        return nullcontext() if weights is None else reading(self.module, weights)

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
        """Before an update; see `Versions.renew`."""
        self._versions.renew()

    def renewed(self) -> None:
        """After an update."""
        self._versions.renewed()


def _edge(y: Tensor) -> GradientEdge:
    """`get_gradient_edge`, without its checks for nodes of torch's own."""
    node = y.grad_fn
    if node is None or isinstance(node, torch._C._FunctionBase):
        return get_gradient_edge(y)
    return GradientEdge(node, y.output_nr)


def sharded_units(module: Any) -> list[Any]:
    """The units of a module's sharded parameters."""
    return [unit for m in module.modules() for unit in getattr(m, "_linop_units", ())]


def _gradient(x: Tensor) -> Tensor | None:
    grad, x.grad = x.grad, None
    return grad
