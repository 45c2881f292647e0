"""Base class of the distributed layers: local torch compute between movement operators (paper,
section 4), with no backward code.

Partitions are given at construction, shapes at a call. Operators are built for the input's global
shape, by agreement of all workers (`linop.layers.agreement.input_agreement`), and cached. Only code
that serves every layer belongs here; the computation of each is in its own module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import cleandoc
from types import FrameType, MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from linop.backends import Backend
from linop.backends.autograd.bridge import bridge_of
from linop.backends.autograd.dtypes import numpy_dtype, torch_dtype
from linop.backends.autograd.functions import apply, is_traced
from linop.backends.autograd.recompute import is_replaying
from linop.backends.together.recorder import namers
from linop.errors import (
    BackendError,
    LinopError,
    PartitionError,
    SubsetError,
    expect,
    name_layer,
)
from linop.layers.agreement.arguments import (
    Said,
    arguments_of,
    compare_values,
    digest,
    recorded,
)
from linop.layers.agreement.input_agreement import (
    Cache,
    InputAgreement,
    LayerDescription,
    agreement_of,
    program_backend,
)
from linop.layers.agreement.metadata import CallMetadata, call_metadata, dtypes_of, space_of
from linop.layers.agreement.naming import path_of
from linop.layers.agreement.watching import mark_block, watch_modules
from linop.layers.parameters.blocks import enlist
from linop.layers.parameters.draws import materialise
from linop.layers.parameters.partial_states import (
    is_partial,
    refuse_loading,
    refuse_saving,
)
from linop.layers.parameters.torch_guards import unfit_parametrization
from linop.layers.traceable import Traceable
from linop.layers.zero_volume import zero_volume_result
from linop.operators.operator import LinearOperator
from linop.spaces.decomposition import Axis
from linop.spaces.partition import Partition
from linop.spaces.tensor import TensorSpace

Function = Callable[..., Tensor]

_CACHE_SIZE = 32
"""Input signatures for which a layer caches bound functions."""


class Bound(NamedTuple):
    """A function of a layer, and for each input, True if a worker needs its gradient."""

    function: Function
    wanted: tuple[bool, ...]


class Call(NamedTuple):
    """A call that all workers agreed on."""

    given: CallMetadata
    code: Any
    """This worker's term of the sum by which they agreed."""
    total: int
    bound: Bound


class Settled(Cache[Call]):
    """Calls of this worker, by their metadata.

    Attributes:
        last: the last one that all workers agreed on, which is the same one on all of them; None if
            there is none.
    """

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self.last: Call | None = None

    def __deepcopy__(self, memo: object) -> Settled:
        return Settled(self._most)


class Layer(Traceable):
    """Base class of distributed modules. Collective: all workers of the program construct it, and
    call it, in the same order, whether they hold a block of the tensor or not.

    A worker of the input's partition passes its block. All others pass a zero-volume tensor, best
    of shape (batch, 0), or None. Blocks need not be balanced; the global shape follows from theirs,
    and may differ at every call. The result is this worker's block of the output; on workers
    that hold none, a zero-volume tensor of shape (batch, 0).

    Args:
        inputs: the partition of each input.
        output: the partition of the output; None where every worker gets one.
        others: the layer's other partitions.

    Attributes:
        spaces: the global tensor of every distributed parameter and buffer, by name. Its dtype
            is unused: the parameter's own applies.

    Raises:
        LinopError: from a call, a tensor is of the wrong kind, device, layout, dtype or shape on
            one of the workers, or blocks do not make up a tensor; on every worker.

    Example:
        >>> class Sorted(layers.Layer):  # the whole, sorted, on every worker
        ...     def bind(self, X):
        ...         gather = self.moved(linop.all_gather, X, None, linop.REPLICATED)
        ...         return lambda x: gather(x).sort().values
        >>> P, x = linop.Partition((2,)), torch.tensor([3.0, 1.0, 2.0, 0.0]).chunk(2)
        >>> linop.launch(lambda b: Sorted([P], None)(x[b.worker]).tolist(), workers=2)
        [[0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 2.0, 3.0]]
    """

    preserve_batch = True
    """True if zero-volume results keep the batch size."""
    floating = True
    """True if inputs have the dtype of the parameters."""
    partitions_once: tuple[str, ...] = ()
    """Partitions that once came after the input's in calls of the constructor, which then warns."""
    x_axes: Sequence[Axis] | None = None
    """Roles of the grid axes of inputs, where a layer is told them; negative dimensions count from
    the last one."""
    constants: Mapping[str, float] = MappingProxyType({})
    """Parameters and buffers that are not drawn, and what they begin with, by name."""
    _call_options: tuple[int, ...] = ()
    """Numbers that a call got beside tensors; the same on all workers."""
    _wanted: tuple[bool, ...]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not cls.__module__.startswith(__package__):
            return
        cls.__doc__ = _with_text_of_base(cls)
        if "__init__" in cls.__dict__:
            cls.__init__ = recorded(cls.__init__)  # type: ignore[method-assign]

    def __init__(
        self, inputs: Sequence[Partition], output: Partition | None, *others: Partition
    ) -> None:
        super().__init__()
        self.backend = program_backend()
        self.inputs = tuple(self._checked(partition) for partition in inputs)
        self.output = None if output is None else self._checked(output)
        for partition in others:
            self._checked(partition)
        self.worker = worker_of(self.backend)
        self.spaces: dict[str, TensorSpace] = {}
        self._agreement: InputAgreement = agreement_of(self.backend)
        self._number = self._agreement.new_number()
        # Keys of the first two, and their order, are the same on all workers: a miss is collective.
        self._agreed = Cache[Bound](_CACHE_SIZE)
        self._bound = Cache[Function](_CACHE_SIZE)
        self._settled = Settled(_CACHE_SIZE)
        enlist(self)

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _checked(self, partition: Any) -> Partition:
        grid: Partition = expect(self._name, partition, Partition)
        there = self.backend.workers or 0
        missing = [w for w in grid.workers if w >= there]
        if missing:
            raise BackendError(
                f"{self._name}: {grid!r} needs workers {missing[:8]}; here there are "
                f"{there}. Start more: linop.launch(main, workers=…), or mpiexec -n …"
            )
        return grid

    # To be overridden

    def axes(self, number: int, ndim: int) -> Sequence[Axis]:
        """Roles of the grid axes of an input's partition, one for each axis: the dimension that it
        splits, `linop.COPIES` or `linop.REPLICATED`.

        Args:
            number: of the input.
            ndim: dimensions of the input.

        Raises:
            LinopError: the input cannot have so many dimensions; on every worker.
        """
        if self.x_axes is not None:
            return [k + ndim if isinstance(k, int) and k < 0 else k for k in self.x_axes]
        grid = self.inputs[number]
        if grid.ndim > ndim:
            raise PartitionError(
                f"{self._name}: a tensor of {ndim} dimensions on {grid!r}; grid axis k splits "
                f"dimension k"
            )
        return range(grid.ndim)

    def invalid_values(self, tensors: Sequence[Tensor | None]) -> str:
        """Description of invalid values in this worker's tensors; empty if there are none.

        It is called before types and shapes are checked. All workers get the text, and raise a
        SubsetError, before any block is sent.
        """
        del tensors
        return ""

    def bind(self, *inputs: TensorSpace) -> Function:
        """Function from this worker's blocks of the inputs to its block of the output.
        Collective: every worker builds the same operators, or raises the same error.

        Args:
            inputs: spaces of the global input tensors.
        """
        raise NotImplementedError

    def dtype_of(self, name: str) -> np.dtype[Any]:
        """NumPy dtype of a parameter; the same on all workers, also on those without a block."""
        return numpy_dtype(self.dtypes[name])

    def moved(
        self,
        make: Callable[..., LinearOperator],
        *arguments: Any,
        of: int | None = None,
        **options: Any,
    ) -> Function:
        """Function that applies a movement operator; the identity if every block stays where it
        is. Collective.

        Args:
            make, arguments, options: the function that builds the operator, and its arguments:
                tensor spaces, numbers and strings, which determine the result. Equal calls share
                one operator and its plans.
            of: the number of the input that it is applied to. If no worker needs that input's
                gradient, as in the first layer of a network, backward sends no messages.
        """
        op = self._agreement.shared_operator(make, arguments, options, self.__dict__["_where"])
        if op is None:
            return _itself
        return self.applied(op, of)

    def applied(self, op: LinearOperator, of: int | None = None) -> Function:
        """Function that applies an operator in autograd; errors name this layer. Collective.

        Args:
            of: as of `moved`.
        """
        bridge_of(op, self.backend)  # compiling is collective, and not all workers may call it
        return Applied(self, op, of, self.__dict__["_where"])

    def reset_parameters(self) -> None:
        """Draw the parameters anew, from torch's generator, as `reset_parameters` of the sequential
        layer does: workers whose generators are in equal states get its values, each those of its
        blocks alone. Parameters and buffers on the meta device get memory on the backend's. They
        stay the same objects. Collective, also for workers without a block.

        Raises:
            ArgumentError: the layer has a parameter that it has not drawn; on every worker.
        """
        from linop.layers.parameters.weights import reset_parameters  # imports this module

        reset_parameters(self)

    # States

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        for name, space in self._partial.items():
            refuse_saving(self._name, prefix + name, space)
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state: Any, prefix: str, *arguments: Any) -> None:
        for name, space in self._partial.items():
            refuse_loading(self._name, prefix + name, space)
        there = [name for name in self.spaces if prefix + name in state]
        materialise(self, self.backend.arrays.device, there)
        super()._load_from_state_dict(state, prefix, *arguments)

    @property
    def _partial(self) -> dict[str, TensorSpace]:
        """Spaces of the parameters and buffers of the state that this worker has not the whole
        of."""
        left = self._non_persistent_buffers_set
        pairs = self.spaces.items()
        return {n: X for n, X in pairs if n not in left and is_partial(X, self.worker)}

    # Calls

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        enlist(self)

    def output_axes(self, grid: Partition, ndim: int) -> Sequence[Axis]:
        """Roles of the grid axes of the output's partition, as `axes` gives those of an input."""
        return self.axes(0, ndim) if grid == self.inputs[0] else range(min(grid.ndim, ndim))

    def _cut(self, grid: Partition, ndim: int) -> list[int]:
        """Dimensions of the output that are split; empty on workers without a block."""
        if self.worker not in grid:
            return []
        axes = zip(self.output_axes(grid, ndim), grid.shape, strict=False)
        return [axis for axis, parts in axes if isinstance(axis, int) and parts > 1]

    def description(self) -> LayerDescription:
        """This worker's description of the layer, which is compared with the others'."""
        return LayerDescription(self._number, self._name, self._name, arguments_of(self))

    def forward(self, *tensors: Tensor | None) -> Tensor:
        """This worker's block of the output. See `Layer`."""
        if torch.compiler.is_dynamo_compiling():
            result: Tensor = self.compiled(*tensors)
            return result
        if torch._C._len_torch_dispatch_stack() and is_traced(tensors):
            return self.traced(*tensors)
        if len(tensors) < len(self.inputs):
            tensors = (*tensors, *[None] * (len(self.inputs) - len(tensors)))
        try:
            function, wanted = self._function(tensors)
            self.__dict__["_wanted"] = wanted  # torch's Module.__setattr__ takes 1.2 µs
            result = function(*tensors)
        except LinopError as error:
            name_layer(error, path_of(self), self._name)
            raise
        if self._agreement.debug and self.output is not None:
            watch_modules()
            mark_block(result, self._cut(self.output, result.ndim))
        return result

    def _metadata(self, tensors: Sequence[Tensor | None]) -> CallMetadata:
        own = tuple(
            [(n, p.shape, p.dtype, p.device) for n, p in self._parameters.items() if p is not None]
        )
        wrong = self.invalid_values(tensors)
        return call_metadata(tensors, self.training, own, wrong, self._call_options)

    def _function(self, tensors: Sequence[Tensor | None]) -> Bound:
        """Function that computes the output, as all workers agree. Collective, except under
        `fixed_shapes` for arguments that were passed before."""
        given = self._metadata(tensors)
        agreement, settled, last = self._agreement, self._settled, self._settled.last
        call = last if last is not None and last.given == given else settled.get(given)
        if agreement.shapes_are_fixed and call is not None:
            return call.bound
        code = agreement.code(self._number, given) if call is None else call.code
        total = agreement.total_of(code)
        if call is not None and call is last and call.total == total and not agreement.debug:
            return call.bound  # so do the others: their last call was the same one
        bound = self._agreed.get(total)
        if bound is None or (agreement.debug and not is_replaying()):
            bound = self._agreed.keep(total, self._new_function(given, self._digests(tensors)))
        settled.last = settled.keep(given, Call(given, code, total, bound))
        return bound

    def _digests(self, tensors: Sequence[Tensor | None]) -> Said:
        """Digests of this worker's tensors, parameters and buffers, by name; empty outside of debug
        mode."""
        if not self._agreement.debug:
            return {}
        given = {_input(k): x for k, x in enumerate(tensors)}
        own = {_own(name): x for name, x in (self._parameters | self._buffers).items()}
        every = (given | own).items()
        return {name: digest(x) for name, x in every if isinstance(x, torch.Tensor)}

    def _new_function(self, mine: CallMetadata, digests: Said) -> Bound:
        cut = [name for name, space in self.spaces.items() if len(space.regions) > 1]
        where = self.__dict__["_where"] = path_of(self)
        made = self.description()._replace(where=where, unfit=unfit_parametrization(self, cut))
        self._number, everybodys, values = self._agreement.agree_on_call(made, mine, digests)
        arrays, inputs = self.backend.arrays, []
        for k, partition in enumerate(self.inputs):
            blocks = [given.tensors[k] for given in everybodys]
            inputs.append(space_of(self._name, partition, blocks, partial(self.axes, k), arrays))
        for worker, given in enumerate(everybodys):
            if given.wrong:
                raise SubsetError(f"{self._name}: worker {worker} passes {given.wrong}")
        of_input = self.floating and not torch.is_autocast_enabled("cpu")
        expected = torch_dtype(inputs[0].dtype) if of_input else None
        self.dtypes = dtypes_of(self._name, self.spaces, everybodys, expected)
        spaces = {_input(k): X for k, X in enumerate(inputs)}
        compare_values(self._name, spaces | {_own(n): X for n, X in self.spaces.items()}, values)
        wanted = tuple(any(given.wants(k) for given in everybodys) for k in range(len(inputs)))
        key = (*(X.made_from for X in inputs), *self.dtypes.items(), self._call_options)
        known = self._bound.get(key)
        if known is None:
            known = self._bound.keep(key, self._with_batch(self.bind(*inputs), inputs[0]))
        return Bound(known, wanted)

    def _with_batch(self, function: Function, X: TensorSpace) -> Function:
        """The function with its zero-volume results reshaped, where `preserve_batch` says so, to
        (batch, 0), or to the shape of the argument on workers without a block on either side; as
        DistDL's layers do."""
        if self.output is None or self.worker in self.output or not self.preserve_batch:
            return function
        outside = all(self.worker not in partition for partition in self.inputs)

        def shape_for(x: Tensor | None) -> tuple[int, ...]:
            if x is None or not (outside or x.ndim):
                return (*X.global_shape[:1], 0)
            return tuple(x.shape) if outside else (x.shape[0], 0)

        if isinstance(function, Applied):  # without another node
            return lambda *tensors: function(tensors[0], shape_for(tensors[0]))

        def call(*tensors: Tensor) -> Tensor:
            if (result := function(*tensors)) is None:  # this worker passed None: nothing moves
                result = zero_volume_result(X)
            nothing_moved = any(result is x for x in tensors)
            result = result.reshape(shape_for(tensors[0]))
            if torch.is_grad_enabled() and result.is_floating_point() and not result.requires_grad:
                result, nothing_moved = result.detach().requires_grad_(), True
            # Neither an argument nor a leaf may be changed in place by who takes the result.
            return result.clone() if nothing_moved else result

        return call


@dataclass(frozen=True, eq=False)
class Applied:
    """A function that applies an operator in autograd.

    Attributes:
        of: number of the input of the layer that it is applied to; without gradient if no worker
            needs that of this input. None: always with it.
        where: name of the layer.
    """

    layer: Layer
    op: LinearOperator
    of: int | None
    where: str

    def __call__(self, x: Any, empty: tuple[int, ...] | None = None) -> Tensor:
        layer = self.layer
        if self.of is None or layer._wanted[self.of]:
            return apply(self.op, x, layer.backend, self.where, empty)  # type: ignore[no-any-return]
        with torch.no_grad():
            return apply(self.op, x, layer.backend, self.where, empty)  # type: ignore[no-any-return]


def _in_words(frame: FrameType) -> str:
    """Path of the layer whose `forward` a frame is; empty for other frames."""
    called = frame.f_code is Layer.forward.__code__
    return path_of(frame.f_locals["self"], frame) if called else ""


namers.append(_in_words)


def _with_text_of_base(kind: type) -> str | None:
    """The docstring of a class. One that is missing, or an example alone, has the text of the base
    class before it: Conv2d says what Conv1d says, and shows images."""
    own, base = cleandoc(kind.__doc__ or ""), getattr(kind.__base__, "__doc__", None)
    if base is None or (own and not own.startswith("Example:")):
        return kind.__doc__
    text, _, _ = cleandoc(base).partition("\n\nExample:")
    return f"{text}\n\n{own}".rstrip()


def worker_of(backend: Backend) -> int:
    """This worker's index in the program of a backend."""
    assert backend.worker is not None
    return backend.worker


def _input(number: int) -> str:
    return f"input {number}"


def _own(name: str) -> str:
    return f"parameter {name!r}"


def _itself(x: Tensor) -> Tensor:
    return x
