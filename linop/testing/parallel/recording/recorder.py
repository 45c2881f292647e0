"""Recording of one step of a torch program on this rank: functions of torch with their arguments
and results, the gradients of both, and what `torch.distributed` moves.

Nothing of the program is changed, except that dropout is switched off, since its masks are drawn
from other random numbers when a model is cut.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch.autograd import Function
from torch.nn.modules import module as hooks

from linop.testing.parallel.recording.collectives import IN_MEMORY, Described, described
from linop.testing.parallel.recording.declared import declarations, kinds, placed
from linop.testing.parallel.recording.gradients import Gradients
from linop.testing.parallel.recording.modes import RANDOM, Functions, Moves
from linop.testing.parallel.recording.probes import Kept, probed
from linop.testing.parallel.recording.records import (
    AFTER,
    BACKWARD,
    FORWARD,
    Call,
    Collective,
    Declared,
    Lifted,
    Probed,
    Tensor,
)
from linop.testing.parallel.recording.rehearsals import rehearsals
from linop.testing.parallel.recording.shadows import Shadows
from linop.testing.parallel.recording.switches import switches
from linop.testing.parallel.recording.tensors import (
    DISTRIBUTED,
    address_of,
    apart,
    has_gaps,
    local,
    numbers,
    tensors_in,
    users_line,
)
from linop.testing.parallel.recording.titles import title


class Recorder:
    """Records what happens between `recording` of a model and its end.

    Attributes:
        tensors, calls, collectives: see `linop.testing.parallel.recording.records`.
        notes: sentences about what was changed.
    """

    shadows: type[Shadows] = Shadows
    """The class that reads `autograd.Function`s element by element."""

    def __init__(self) -> None:
        self.wanted: set[tuple[str, str, str, int]] = set()
        """Calls of `autograd.Function`s to be looked at alone."""
        self._to_probe: list[tuple[Call, Kept]] = []
        self._seen: Counter[tuple[str, str, str]] = Counter()
        self.tensors: list[Tensor] = []
        self.calls: list[Call] = []
        self.collectives: list[Collective] = []
        self.notes: list[str] = []
        self._names: dict[int, str] = {}
        self._numbers: dict[tuple[int, int], int] = {}
        self._kept: list[Any] = []
        """Objects whose identity is a key: they must not be freed before the end."""
        self._modules: list[tuple[str, str, torch.nn.Module]] = []
        self._paths: dict[int, str] = {}
        self._functions: list[int] = []
        self._operations: list[str] = []
        self._nodes: dict[Any, int] = {}
        self.passes = 0
        self._made: dict[tuple[Any, int], int] = {}
        """Tensors by the node that computed them, and its output."""
        self.gradients = Gradients()
        self._pending: dict[int, list[tuple[Tensor, torch.Tensor]]] = {}
        """Results of functional collectives that nobody has waited for, by their memory."""
        self.unsynchronized: list[str] = []
        self.divided: list[str] = []
        self.declared: list[Declared] = []
        self.lifted: list[Lifted] = []
        self._shadows: list[Shadows] = []
        self.is_aside = False

    # The context

    @contextmanager
    def recording(self, model: torch.nn.Module, plain: Callable[[str], str]) -> Iterator[None]:
        """Context of a step.

        Args:
            plain: from names of modules and parameters to those of the twin.
        """
        self._paths = {id(one): plain(name) for name, one in model.named_modules()}
        parameters: dict[str, torch.Tensor] = {}
        parameters |= {plain(name): one for name, one in model.named_parameters()}
        self.gradients.parameters = parameters
        buffers = {plain(name): one for name, one in model.named_buffers()}
        for name, one in {**parameters, **buffers}.items():
            self._names[id(local(one))] = self._names[id(one)] = name
            self._kept.append(one)
        with ExitStack() as stack:
            enter, leave = self._entered, self._left
            for hook in (
                hooks.register_module_forward_pre_hook(enter),
                hooks.register_module_forward_hook(leave, always_call=True),
            ):
                stack.callback(hook.remove)
            stack.enter_context(self._applied())
            stack.enter_context(switches(self.unsynchronized.append, self.divided.append))
            stack.enter_context(declarations(self.declared.append, self.aside))
            stack.enter_context(rehearsals(self.aside))
            stack.enter_context(Moves(self))
            stack.enter_context(Functions(self))
            yield

    def _entered(self, module: torch.nn.Module, args: Any) -> None:
        del args
        path = self._paths.get(id(module))
        if path is None:
            path = self._modules[-1][0] if self._modules else ""
        self._modules.append((path, type(module).__name__, module))

    def _left(self, module: Any, args: Any, output: Any) -> None:
        del module, args, output
        if self._modules:
            self._modules.pop()

    @contextmanager
    def _applied(self) -> Iterator[None]:
        """Calls of `autograd.Function`s are recorded, those of an ``apply`` too that the program
        has taken before."""
        recorder = self
        calling: list[Any] = []
        """The function that is called by what replaces `Function.apply`."""
        taken: Any = torch._C._FunctionBase.__dict__["apply"]

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if recorder.is_aside:
                return before.__get__(None, cls)(*args, **kwargs)
            with recorder.applying(cls, args, kwargs) as finish:
                calling.append(cls)
                try:
                    return finish(before.__get__(None, cls)(*args, **kwargs))
                finally:
                    calling.clear()

        def apply_taken(cls: Any, *args: Any, **kwargs: Any) -> Any:
            plain = taken.__get__(None, cls)
            if calling == [cls] or recorder.is_aside:
                calling.clear()
                return plain(*args, **kwargs)
            with recorder.applying(cls, args, kwargs) as finish:
                return finish(plain(*args, **kwargs))

        before: Any = Function.__dict__["apply"]  # of C since torch 2.14
        inner = Function.__mro__[1]
        below = isinstance(before, classmethod) and "apply" not in inner.__dict__
        Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment]
        if below:
            inner.apply = classmethod(apply_taken)  # type: ignore[attr-defined]
        try:
            yield
        finally:
            Function.apply = before  # type: ignore[method-assign]
            if below:
                del inner.apply  # type: ignore[attr-defined]

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Context of work of our own, which is not recorded."""
        before, self.is_aside = self.is_aside, True
        try:
            with torch._C.DisableTorchFunction():
                yield
        finally:
            self.is_aside = before

    @contextmanager
    def applying(self, kind: Any, args: Any, kwargs: Any) -> Iterator[Callable[[Any], Any]]:
        """Context of a call of an `autograd.Function`; yields a function to be given its result."""
        given = list(tensors_in((args, kwargs)))
        call = self._call(title(kind.__name__), given)
        call.custom, call.placed = True, placed(kind, args)
        self._keep(call, kind, args)
        self._functions.append(call.number)
        with self.aside():
            self._shadows.append(self.shadows(call.number, False, given))

        def finish(result: Any) -> Any:
            found = list(tensors_in(result))
            with self.aside():
                self.lifted.append(self._shadows[-1].finish(found))
                for one in found:
                    self._changed(one)
            call.outputs = [self.seen(one, call.number) for one in found]
            nodes = dict.fromkeys(one.grad_fn for one in found if one.grad_fn is not None)
            for node in nodes:
                self._nodes[node] = call.number
                self._follow(node, call)
            return result

        try:
            yield finish
        finally:
            self._functions.pop()
            self._shadows.pop()

    def _keep(self, call: Call, kind: Any, args: Any) -> None:
        """Keep the arguments of a call that is to be looked at alone."""
        if call.inside >= 0 or call.phase != FORWARD:
            return
        called = call.name, call.module, call.line
        self._seen[called] += 1
        about = *called, self._seen[called]
        if about in self.wanted:
            with self.aside():
                self._to_probe.append((call, Kept.of(kind, args, about)))

    def probe(self) -> list[Probed]:
        """Look at functions alone, after the step."""
        for call, kept in self._to_probe:
            came = (self.tensors[number].gradient for number in call.outputs)
            kept.cotangents = [None if one is None else torch.from_numpy(one) for one in came]
        return [probed(kept) for _, kept in self._to_probe]

    def _follow(self, node: Any, call: Call) -> None:
        """Look at what the backward of a function does."""

        def begin(gradients: Any) -> Any:
            if call.placed is not None:
                found: list[Any] = [one for one in gradients if isinstance(one, DISTRIBUTED)]
                call.placed.arrived = kinds(found[0].placements) if found else None
            with self.aside():
                gradients = tuple(apart(one) for one in gradients)
                self._shadows.append(self.shadows(call.number, True, gradients))
            return gradients

        def end(inputs: Any, outputs: Any) -> None:
            del outputs
            if self._shadows:
                with self.aside():
                    self.lifted.append(self._shadows.pop().finish(inputs))

        node.register_prehook(begin)
        node.register_hook(end)

    def operation(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """An operation of torch has run."""
        for shadows in self._shadows:
            shadows.operation(func, args, kwargs, result)

    def _changed(self, tensor: torch.Tensor) -> None:
        """Something that torch does not count has changed the tensor: it is another one now."""
        for key in [key for key in self._numbers if key[0] == id(tensor)]:
            del self._numbers[key]

    # What is recorded

    def _phase(self, inputs: Sequence[torch.Tensor] = ()) -> str:
        if torch._C._current_graph_task_id() != -1:
            self.passes = max(self.passes, 1)
            return BACKWARD
        if not self.passes or self._modules or self._functions:
            return FORWARD
        if torch.is_grad_enabled() and any(one.requires_grad for one in inputs):
            return FORWARD  # of the next part of a batch
        self.gradients.find()
        return AFTER

    def _call(self, name: str, inputs: Sequence[torch.Tensor]) -> Call:
        path, kind = self._modules[-1][:2] if self._modules else ("", "")
        numbered = [self.seen(one) for one in inputs]
        number = len(self.calls)
        about: dict[str, Any] = {"inside": self._functions[-1] if self._functions else -1}
        about |= {"phase": self._phase(inputs), "backward_of": self._backward_of()}
        call = Call(number, name, path, kind, *users_line(), numbered, [], **about)
        self.calls.append(call)
        return call

    def _backward_of(self) -> int:
        node = torch._C._current_autograd_node()
        return -1 if node is None else self._nodes.get(node, -1)

    def called(self, name: str, inputs: Sequence[torch.Tensor], result: Any) -> None:
        """Record a call of a function of torch."""
        call = self._call(name, inputs)
        found = [one for one in tensors_in(result) if one is not None]
        call.outputs = [self.seen(one, call.number) for one in found]
        if name in RANDOM and call.phase == FORWARD:
            self.notes.append(
                f"random numbers are drawn at {call.line} ({name}): what follows is compared only "
                f"if both models draw the same"
            )
        if call.phase == AFTER:
            self.gradients.used(name, f"{call.line}: {call.text}", inputs, found)

    def replaced(self, tensor: torch.Tensor) -> None:
        """An attribute of a tensor is set, such as the gradient of a parameter."""
        name = self._names.get(id(tensor), "")
        known = name in self.gradients.parameters and tensor.grad is not None
        if known and self._phase() == AFTER:
            self.gradients.has_changed(name, ": ".join(users_line()))

    def dropped(self, tensor: torch.Tensor) -> None:
        """An attribute of a tensor is set to None."""
        name = self._names.get(id(tensor), "")
        if name in self.gradients.parameters and tensor.grad is not None:
            self.gradients.lines[name] = ": ".join(users_line())

    def seen(self, tensor: torch.Tensor, call: int = -1) -> int:
        """The number of a tensor, new or known."""
        key = id(tensor), tensor._version
        number = self._numbers.get(key)
        if number is None:
            with self.aside():
                number = self._numbers[key] = self._new(tensor, call)
        elif tensor.requires_grad and not self.tensors[number].differentiable and tensor.is_leaf:
            with self.aside():  # `requires_grad_` has made it so since
                known = self.tensors[number]
                known.differentiable = True
                known.parameter = known.parameter or self._name(tensor)
                tensor.register_hook(self._adding(self.tensors[number]))
        return number

    def _new(self, tensor: torch.Tensor, call: int) -> int:
        number = len(self.tensors)
        differentiable = tensor.requires_grad
        pending = self._pending.get(address_of(tensor)) if self._pending else None
        record = Tensor(
            number,
            numbers(tensor) if pending is None else None,
            differentiable,
            self._name(tensor),
            str(tensor.dtype).removeprefix("torch."),
        )
        self.tensors.append(record)
        self._kept.append(tensor)
        if pending is not None:
            pending.append((record, tensor))
        if differentiable and torch.is_grad_enabled():
            if tensor.grad_fn is not None:
                if call < 0:
                    record.sources = tuple(self._sources(tensor.grad_fn))
                self._made.setdefault((tensor.grad_fn, tensor.output_nr), number)
            tensor.register_hook(self._adding(record))
        return number

    def _adding(self, record: Tensor) -> Callable[[torch.Tensor], None]:
        def add(gradient: torch.Tensor | None) -> None:
            if gradient is None:
                return
            with self.aside():
                value = numbers(gradient)
            if value is not None:
                record.gradient = value if record.gradient is None else record.gradient + value

        return add

    def _name(self, tensor: torch.Tensor) -> str:
        """The name of the parameter that a tensor is, or is a view of."""
        for one in (tensor, local(tensor), tensor._base):
            if one is not None and (name := self._names.get(id(one))):
                return name
        # What FSDP puts in the place of a parameter for the time of a call.
        path, _, module = self._modules[-1] if self._modules else ("", "", None)
        for name, one in () if module is None else module._parameters.items():
            if one is not None and (one is tensor or one is tensor._base):
                return f"{path}.{name}" if path else name
        return ""

    def _sources(self, node: Any) -> list[int]:
        """Known tensors from which a node of the graph of derivatives computes, by way of nodes
        that are not known."""
        found, waiting, done = [], [(node, 0)], set()
        first = True
        while waiting:
            one = waiting.pop()
            if one in done or one[0] is None:
                continue
            done.add(one)
            known = None if first else self._made.get(one)
            first = False
            if known is not None:
                found.append(known)
            elif (variable := getattr(one[0], "variable", None)) is not None:
                number = self._numbers.get((id(variable), variable._version))
                found += [] if number is None else [number]
            elif len(done) < 200:
                waiting += one[0].next_functions
        return found

    def finished(self) -> None:
        """Let go of the program's tensors, and of functions without collectives."""
        moving = {one.call for one in self.lifted if one.moved}
        self.lifted = [one for one in self.lifted if one.call in moving]
        parameters = self.gradients.parameters
        for kept in (self._kept, self._numbers, self._nodes, self._made, parameters):
            kept.clear()

    def moved(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Record a collective; before it has run, unless it is a functional one."""
        for found in described(func, args, kwargs, result):
            self._moved(found)
            if found.functional:
                self._pending |= {address_of(one): [] for one in found.changed}

    def waited(self, tensor: torch.Tensor) -> None:
        """A functional collective has ended: its results have their values."""
        with self.aside():
            for record, one in self._pending.pop(address_of(tensor), ()):
                record.value = numbers(one)

    def _moved(self, found: Described) -> None:
        line, text = users_line()
        about: dict[str, Any] = {
            "phase": self._phase(),
            "inside": self._functions[-1] if self._functions else -1,
            "backward_of": self._backward_of(),
            "line": line,
            "text": text,
            "parameter": self.gradients.name(found.tensors),
            "within": self._operations[-1] if self._operations else "",
        }
        if about["phase"] == AFTER:
            about["of"] = self.gradients.moved(found.tensors, found.changed, f"{line}: {text}")
        for one in found.changed:
            self._changed(one)
        with self.aside():
            raw = found.name in IN_MEMORY and not found.functional
            for shadows in self._shadows:
                shadows.collective(len(self.collectives), found.tensors, found.changed, raw)
            if raw and any(map(has_gaps, (*found.tensors, *found.changed))):
                self.notes.append(
                    f"{line}: a tensor whose elements are not side by side in memory is given to "
                    f"{found.name}, and gloo moves those that are; make it contiguous()"
                )
            arrays = [numbers(one) for one in found.tensors]
        kept = [one.reshape(-1) for one in arrays if one is not None]
        self.collectives.append(
            Collective(
                number=len(self.collectives),
                value=np.concatenate(kept) if kept and len(kept) == len(arrays) else None,
                **found.plain(),
                **about,
            )
        )

    @contextmanager
    def operating(self, func: Any) -> Iterator[None]:
        """Context of an operation of DTensors."""
        self._operations.append(str(func._schema.name))
        try:
            yield
        finally:
            self._operations.pop()
