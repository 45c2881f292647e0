"""Styles of modules that are not cut: of modules on blocks, as norms on a split sequence, and of
inputs and outputs in other layouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Module

from linop.errors import ArgumentError
from linop.layers.layer import Layer
from linop.spaces.partition import balanced
from linop.spaces.region import integer
from linop.strategies.mesh import Axis
from linop.strategies.tensor.conversions import convert_inputs, convert_output, hold
from linop.strategies.tensor.copies import use_copies
from linop.strategies.tensor.layouts import Layout, layout_of
from linop.strategies.tensor.modules.layer import Redistribute
from linop.strategies.tensor.modules.sequence import Pointwise, SequenceNorm
from linop.strategies.tensor.styles.style import Style, no_copies, refuse

ELEMENTWISE = (
    *(torch.nn.Identity, torch.nn.ReLU, torch.nn.GELU, torch.nn.SiLU, torch.nn.Sigmoid),
    *(torch.nn.Tanh, torch.nn.ELU, torch.nn.LeakyReLU, torch.nn.Softplus),
)
_NORMS = torch.nn.LayerNorm, torch.nn.RMSNorm


@dataclass(frozen=True)
class SequenceParallel(Style):
    """A module with whole parameters on a split tensor: a norm of any class on a split sequence or
    on heads, a router, an elementwise module.

    The parameters are used as copies (E), of which the adjoint is the all-reduce of their
    gradients. Its functions are followed as those of any module: one along the split dimension is
    refused at the first call. `torch.nn.LayerNorm`, `torch.nn.RMSNorm` and elementwise modules of
    torch are replaced; a module of another class stays, with its hooks and attributes.

    Args:
        sequence_dim: the dimension that is split; None: any one, as for norms of queries and keys,
            whose input is split by heads; or none, of an input that is a copy on each worker.
        input_layouts, output_layouts: layouts of input and output, by default both split; with
            others the input is cut before, or the output gathered.

    Example:
        Each worker has two of four tokens; the gradient of the bias counts all four on both:

        >>> import copy
        >>> net, x = torch.nn.LayerNorm(2), torch.arange(8.0).view(1, 4, 2)
        >>> def program(backend):
        ...     tp, style = strategies.Mesh(tp=2)["tp"], strategies.SequenceParallel()
        ...     mine = strategies.parallelize_module(copy.deepcopy(net), tp, style, inputs=1)
        ...     mine(x.chunk(2, 1)[tp.index]).sum().backward()
        ...     return mine.bias.grad.tolist()
        >>> linop.launch(program, workers=2)
        [[4.0, 4.0], [4.0, 4.0]]
    """

    sequence_dim: int | None = 1
    input_layouts: Any = None
    output_layouts: Any = None

    def check(self, module: Module, axis: Axis, name: str) -> None:
        if isinstance(module, Layer):
            refuse(self, name, module, "a sequential module")
        if self.sequence_dim is not None:
            integer(self.sequence_dim, f"{name!r}: sequence_dim")
        elif self.input_layouts is not None or self.output_layouts is not None:
            raise ArgumentError(
                f"{name!r}: sequence_dim=None, and input_layouts= or output_layouts=; the "
                f"dimension that is split in between expected"
            )
        for given in (self.input_layouts, self.output_layouts):
            if given is not None:
                layout_of(given, "layouts")
        no_copies(self.output_layouts)

    def keeps(self, module: Module) -> bool:
        return self.sequence_dim is None or not (_is_norm(module) or _is_elementwise(module))

    def apply(self, module: Module, axis: Axis) -> Module:
        ends = [
            None if given is None else layout_of(given, "layouts")
            for given in (self.input_layouts, self.output_layouts)
        ]
        if self.keeps(module):
            return use_copies(module, axis, self.sequence_dim, *ends)
        assert self.sequence_dim is not None
        kind = SequenceNorm if _is_norm(module) else Pointwise
        a, b = (self.sequence_dim if given is None else given for given in ends)
        return kind(axis, module, self.sequence_dim, a, b)


def _is_norm(module: Module) -> bool:
    return type(module) in _NORMS


def _is_elementwise(module: Module) -> bool:
    return isinstance(module, ELEMENTWISE) and not [*module.parameters(), *module.children()]


@dataclass(frozen=True)
class PrepareModuleInput(Style):
    """Any module, whose inputs are converted before its call: once for all modules in it.

    Args:
        input_layouts: layouts of the positional inputs; one alone, of the first. None stands for
            an input that is left as it is.
        desired_input_layouts: those that the module gets, likewise: `linop.COPIES` for modules in
            it that take an input in this layout.
        input_kwarg_layouts, desired_input_kwarg_layouts: the same of inputs by name, as
            dictionaries with the same names. An input that is None stays None.

    Example:
        The input is split along the sequence, gathered once, and the result is split again:

        >>> import copy
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2))
        >>> plan = {
        ...     "": strategies.PrepareModuleInput(1, linop.COPIES),
        ...     "0": strategies.ColwiseParallel(linop.COPIES),
        ...     "2": strategies.RowwiseParallel(output_layouts=1),
        ... }
        >>> x = torch.randn(1, 4, 2)
        >>> def program(backend):
        ...     tp = strategies.Mesh(tp=2)["tp"]
        ...     mine = strategies.parallelize_module(copy.deepcopy(net), tp, plan, inputs=1)
        ...     rows, wanted = (y.chunk(2, 1)[tp.index] for y in (x, net(x)))
        ...     return torch.allclose(mine(rows), wanted, atol=1e-6)
        >>> linop.launch(program, workers=2)
        [True, True]
    """

    input_layouts: Any = ()
    desired_input_layouts: Any = ()
    input_kwarg_layouts: Mapping[str, Any] | None = None
    desired_input_kwarg_layouts: Mapping[str, Any] | None = None

    def check(self, module: Module, axis: Axis, name: str) -> None:
        given, wanted = _many(self.input_layouts), _many(self.desired_input_layouts)
        if len(given) != len(wanted):
            raise ArgumentError(
                f"{name!r}: {len(given)} input_layouts and {len(wanted)} desired_input_layouts; as "
                f"many expected"
            )
        named, wished = _named(self.input_kwarg_layouts), _named(self.desired_input_kwarg_layouts)
        if {*named} != {*wished}:
            raise ArgumentError(
                f"{name!r}: input_kwarg_layouts of {', '.join(named) or 'nothing'}, and "
                f"desired_input_kwarg_layouts of {', '.join(wished) or 'nothing'}; the same names "
                f"expected"
            )
        if not given and not named:
            raise ArgumentError(
                f"{name!r}: PrepareModuleInput of nothing; input_layouts= and "
                f"desired_input_layouts=, or input_kwarg_layouts= and "
                f"desired_input_kwarg_layouts= expected"
            )

    def keeps(self, module: Module) -> bool:
        return True

    def apply(self, module: Module, axis: Axis) -> Module:
        pairs = zip(_many(self.input_layouts), _many(self.desired_input_layouts), strict=True)
        hold(module, "inputs", [_between(axis, given, wanted) for given, wanted in pairs])
        named, wished = _named(self.input_kwarg_layouts), _named(self.desired_input_kwarg_layouts)
        hold(module, "options", {key: _between(axis, named[key], wished[key]) for key in named})
        module.register_forward_pre_hook(convert_inputs, with_kwargs=True)
        return module


@dataclass(frozen=True)
class PrepareModuleOutput(Style):
    """Any module, whose output is converted after its call.

    Args:
        output_layouts: layout of the tensor that it computes; of a tuple, layouts of its members,
            where None stands for one that is left as it is.
        desired_output_layouts: that of the result, likewise.
        heads: of a dimension that is cut, the number of parts of equal length that stay whole.

    Example:
        The features of the last layer are split; every worker gets them all:

        >>> import copy
        >>> net, x = torch.nn.Sequential(torch.nn.Linear(2, 6)), torch.ones(4, 2)
        >>> plan = {
        ...     "": strategies.PrepareModuleOutput(-1, linop.REPLICATED),
        ...     "0": strategies.ColwiseParallel(),
        ... }
        >>> def program(backend):
        ...     tp = strategies.Mesh(tp=2)["tp"]
        ...     mine = strategies.parallelize_module(copy.deepcopy(net), tp, plan)
        ...     return torch.allclose(mine(x), net(x), atol=1e-6)
        >>> linop.launch(program, workers=2)
        [True, True]
    """

    output_layouts: Any
    desired_output_layouts: Any
    heads: int | None = None

    def check(self, module: Module, axis: Axis, name: str) -> None:
        given = _many(self.output_layouts, "output_layouts")
        wanted = _many(self.desired_output_layouts, "desired_output_layouts")
        if len(given) != len(wanted) or not given:
            raise ArgumentError(
                f"{name!r}: {len(given)} output_layouts and {len(wanted)} desired_output_layouts; "
                f"as many expected"
            )
        if self.heads is not None and integer(self.heads, f"{name!r}: heads") < axis.size:
            raise ArgumentError(
                f"{name!r}: {self.heads} heads for {axis.size} workers of {axis.name!r}; one each "
                f"at least expected"
            )

    def keeps(self, module: Module) -> bool:
        return True

    def apply(self, module: Module, axis: Axis) -> Module:
        pairs = zip(_many(self.output_layouts), _many(self.desired_output_layouts), strict=True)
        hold(module, "output", [_between(axis, *pair, self.heads) for pair in pairs])
        module.register_forward_hook(convert_output)
        return module


@dataclass(frozen=True)
class PrepareModuleInputOutput(Style):
    """Any module, whose inputs are converted before its call, and whose output after it: both of
    `PrepareModuleInput` and `PrepareModuleOutput`.

    Args:
        input_layouts, desired_input_layouts: of positional inputs, before and in the module.
        input_kwarg_layouts, desired_input_kwarg_layouts: the same of inputs by name.
        output_layouts, desired_output_layouts: of the output, in and after the module.
        heads: of a dimension of the output that is cut, the parts that stay whole.

    Example:
        Rows of the batch come and go; in the module every worker has them all:

        >>> import copy
        >>> net, x = torch.nn.Linear(2, 3), torch.ones(4, 2)
        >>> whole = linop.REPLICATED
        >>> style = strategies.PrepareModuleInputOutput(
        ...     0, whole, output_layouts=whole, desired_output_layouts=0
        ... )
        >>> def program(backend):
        ...     tp = strategies.Mesh(tp=2)["tp"]
        ...     mine = strategies.parallelize_module(copy.deepcopy(net), tp, style, inputs=0)
        ...     rows, wanted = (y.chunk(2)[tp.index] for y in (x, net(x)))
        ...     return torch.allclose(mine(rows), wanted, atol=1e-6)
        >>> linop.launch(program, workers=2)
        [True, True]
    """

    input_layouts: Any = ()
    desired_input_layouts: Any = ()
    input_kwarg_layouts: Mapping[str, Any] | None = None
    desired_input_kwarg_layouts: Mapping[str, Any] | None = None
    output_layouts: Any = ()
    desired_output_layouts: Any = ()
    heads: int | None = None

    @property
    def _both(self) -> Sequence[Style]:
        by_name = self.input_kwarg_layouts, self.desired_input_kwarg_layouts
        return (
            PrepareModuleInput(self.input_layouts, self.desired_input_layouts, *by_name),
            PrepareModuleOutput(self.output_layouts, self.desired_output_layouts, self.heads),
        )

    def check(self, module: Module, axis: Axis, name: str) -> None:
        for style in self._both:
            style.check(module, axis, name)

    def keeps(self, module: Module) -> bool:
        return True

    def apply(self, module: Module, axis: Axis) -> Module:
        for style in self._both:
            style.apply(module, axis)
        return module


@dataclass(frozen=True)
class LocalAttributes(Style):
    """Any module, of whose numbers each worker has its share: a number of heads, or of their
    features, that it makes shapes with, as ``n_heads`` or ``attn_dim``.

    Attributes of a module belong to it alone; those of a configuration that modules share stay.

    Args:
        names: of attributes, whole numbers; one alone, or several.
        heads: parts of equal length that stay whole, as for `ColwiseParallel`; by default the
            number itself.

    Example:
        A module that makes shapes with its number of heads, of which each worker has two of four:

        >>> class Heads(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.n_heads, self.q = 4, torch.nn.Linear(2, 8)
        ...
        ...     def forward(self, x):
        ...         return self.q(x).view(len(x), self.n_heads, 2)
        >>> q = strategies.ColwiseParallel(heads=4)
        >>> plan = {"": strategies.LocalAttributes("n_heads"), "q": q}
        >>> def program(backend):
        ...     with layers.seeded(0):
        ...         net = Heads()
        ...     mine = strategies.parallelize_module(net, strategies.Mesh(tp=2)["tp"], plan)
        ...     return mine.n_heads, tuple(mine(torch.ones(3, 2)).shape)
        >>> linop.launch(program, workers=2)
        [(2, (3, 2, 2)), (2, (3, 2, 2))]
    """

    names: str | Sequence[str]
    heads: int | None = None

    def check(self, module: Module, axis: Axis, name: str) -> None:
        for attribute in self._names:
            n = getattr(module, attribute, None)
            if not isinstance(n, int) or isinstance(n, bool):
                there = [k for k, v in vars(module).items() if type(v) is int]
                raise ArgumentError(
                    f"{name!r}: LocalAttributes({attribute!r}), which is {n!r}; a whole number "
                    f"expected, as {', '.join(there) or 'none that there is'}"
                )
            heads = n if self.heads is None else integer(self.heads, f"{name!r}: heads")
            if heads < axis.size or n % heads:
                raise ArgumentError(
                    f"{name!r}: {attribute}={n} in {heads} parts for {axis.size} workers of "
                    f"{axis.name!r}; equal parts, and one for each worker at least expected"
                )

    @property
    def _names(self) -> Sequence[str]:
        return [self.names] if isinstance(self.names, str) else self.names

    def keeps(self, module: Module) -> bool:
        return True

    def apply(self, module: Module, axis: Axis) -> Module:
        for attribute in self._names:
            n: Any = getattr(module, attribute)
            heads = self.heads or n
            setattr(module, attribute, balanced(heads, axis.size)[axis.index] * (n // heads))
        return module


def _between(
    axis: Axis, given: Layout | None, wanted: Layout | None, heads: int | None = None
) -> Any:
    """The conversion of one layout to another; None for an input that is left as it is."""
    if given is None or wanted is None:
        return None
    return Redistribute(axis, given, wanted, heads)


def _many(layouts: Any, what: str = "input_layouts") -> Sequence[Layout | None]:
    many = layouts if isinstance(layouts, tuple | list) else [layouts]
    return [None if one is None else layout_of(one, what) for one in many]


def _named(layouts: Mapping[str, Any] | None) -> Mapping[str, Layout | None]:
    if layouts is not None and not isinstance(layouts, Mapping):
        raise ArgumentError(f"input_kwarg_layouts: layouts by name expected; given {layouts!r}")
    names = dict(layouts or {})
    return dict(zip(names, _many([*names.values()], "input_kwarg_layouts"), strict=True))
