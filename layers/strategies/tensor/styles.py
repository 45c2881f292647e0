"""Styles of a plan: torch's names, with the layouts of this package as their arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Module

from linop.errors import ArgumentError, PartitionError
from linop.layers.layer import Layer
from linop.spaces.decomposition import COPIES, REPLICATED
from linop.spaces.partition import balanced
from linop.spaces.region import integer
from linop.strategies.mesh import Axis
from linop.strategies.tensor.embedding import ParallelEmbedding
from linop.strategies.tensor.layer import ParallelLayer, Redistribute
from linop.strategies.tensor.layouts import Layout, layout_of
from linop.strategies.tensor.linear import ColwiseLinear, RowwiseLinear, SharedColwiseLinear
from linop.strategies.tensor.sequence import Pointwise, SequenceNorm

_CUT = torch.nn.Linear, torch.nn.Embedding
"""Modules whose weights are cut."""


class Style:
    """How a named module is made parallel."""

    def check(self, module: Module, axis: Axis, name: str) -> None:
        """Check that the style is for such a module.

        Raises:
            ArgumentError, PartitionError: it is not.
        """
        raise NotImplementedError

    def apply(self, module: Module, axis: Axis) -> Module:
        """The module that takes its place; itself, with hooks."""
        raise NotImplementedError


def _refuse(style: Style, name: str, module: Module, expected: str) -> None:
    if isinstance(module, Layer):
        raise ArgumentError(
            f"{name!r} is parallel already ({type(module).__name__}); "
            f"parallelise the sequential module once"
        )
    hint = ""
    if isinstance(module, torch.nn.MultiheadAttention):
        hint = (
            ". Its projections are in one tensor: use an attention module with a torch.nn.Linear "
            "for each, and name those"
        )
    elif type(module) not in _CUT and isinstance(module, _CUT):
        hint = (
            f". {type(module).__module__}.{type(module).__name__} computes something else, or has "
            f"more parameters: put a plain one in its place"
        )
    raise ArgumentError(
        f"{name!r} is a {type(module).__name__}; {type(style).__name__} is for {expected}{hint}"
    )


def _computes_as(module: Module, kinds: tuple[Any, ...]) -> bool:
    """True for a module of one of these classes, and of a subclass that computes the same bits from
    the same parameters, as those of timm do."""
    if type(module) in kinds:
        return True
    own = [kind for kind in kinds if isinstance(module, kind)]
    names = {name for name, _ in module.named_parameters()}
    if not own or not names <= {"weight", "bias"} or [*module.children(), *module.buffers()]:
        return False
    return type(module).forward is own[0].forward or _same_on_trial(module, own[0])


def _same_on_trial(module: Any, kind: Any) -> bool:
    weight = module.weight
    if weight.is_meta:
        return False
    if kind is torch.nn.Embedding:
        given = torch.arange(len(weight), device=weight.device)
    else:
        numbers = torch.arange(3 * module.in_features, device=weight.device) % 7 - 3
        given = numbers.to(weight.dtype).view(3, -1)
    with torch.no_grad():
        return torch.equal(module(given), kind.forward(module, given))


def _sizes(
    n: int, heads: int | None, axis: Axis, name: str, queries: int | None = None
) -> Sequence[int]:
    """Lengths of the blocks of n features, or of words: balanced, of whole heads; of fewer heads
    than workers, one each, which as many workers share.

    Args:
        queries: heads of the queries that these heads are for.
    """
    if heads is None:
        return balanced(n, axis.size)
    if integer(heads, f"{name!r}: heads") < 1 or n % heads:
        raise PartitionError(
            f"{name!r} has {n} features, and heads={heads}: as many for each expected"
        )
    if queries is None and heads < axis.size:
        raise PartitionError(
            f"{name!r} has {heads} heads for {axis.size} workers of "
            f"{axis.name!r}; one each at least expected, or, of keys and values that workers are "
            f"to share, queries=, the number of heads of the queries"
        )
    if queries is not None:
        hint = "" if heads < axis.size else f"; or heads={heads} of all, without queries="
        _check_queries(queries, heads, axis, name, hint)
    if heads < axis.size:
        return [n // heads] * heads
    return [k * (n // heads) for k in balanced(heads, axis.size)]


def _check_queries(queries: int, heads: int, axis: Axis, name: str, hint: str) -> None:
    """Raise if a balanced cut of the queries' heads gives a worker those of groups that it has not.

    Args:
        hint: what else would do.

    Raises:
        PartitionError: workers do not divide into groups, nor groups into workers; or the heads of
            the queries not into the larger number of both.
    """
    few, many = sorted((heads, axis.size))
    same = queries == heads >= axis.size  # no groups
    if integer(queries, f"{name!r}: queries") < 1 or (not same and (many % few or queries % many)):
        raise PartitionError(
            f"{name!r}: {queries} heads of queries in {heads} groups for "
            f"{axis.size} workers of {axis.name!r}; as many workers for each group, or groups for "
            f"each worker, and as many heads of queries for each of them expected{hint}"
        )


def check_groups(styles: Mapping[str, Style], axis: Axis) -> None:
    """Check heads without `queries` beside the most heads of any submodule of the same module,
    which are taken for those of the queries.

    Args:
        styles: of submodules, by name.

    Raises:
        PartitionError: as `_check_queries`.
    """
    cut = {
        name: style
        for name, style in styles.items()
        if isinstance(style, ColwiseParallel) and style.heads is not None
    }
    most: dict[str, int] = {}
    for name, style in cut.items():
        owner = name.rpartition(".")[0]
        most[owner] = max(most.get(owner, 0), style.heads or 0)
    for name, style in cut.items():
        queries, heads = most[name.rpartition(".")[0]], style.heads
        if style.queries is None and heads is not None and queries > heads:
            hint = f"; or heads={heads} of all; or queries={heads}, if they are for no others"
            _check_queries(queries, heads, axis, name, hint)


@dataclass(frozen=True)
class ColwiseParallel(Style):
    """Cut of a `torch.nn.Linear` by output, or of a `torch.nn.Embedding` by features.

    Args:
        input_layouts: layout of the input: `linop.REPLICATED`; `linop.COPIES`, after a
            `PrepareModuleInput` that several modules share; or a dimension, as of a sequence.
        output_layouts: layout of the output: -1, the features, without messages; or another.
        heads: the number of parts of equal length that are not cut, of which each worker has
            as many as any other, or one less: of grouped queries, the number of groups. By default
            features are cut anywhere.
        queries: of keys and values in fewer groups than workers, the number of heads of the
            queries; of more, by default the most heads of any submodule of the same module.
            Workers whose queries are in one group hold its weights as one tensor, whose gradient is
            the sum of theirs: E, and its adjoint. Attention has to take the number of groups from
            its shapes (as with ``enable_gqa=True``).
    """

    input_layouts: Any = REPLICATED
    output_layouts: Any = -1
    heads: int | None = None
    queries: int | None = None

    def check(self, module: Module, axis: Axis, name: str) -> None:
        if not _computes_as(module, _CUT):
            _refuse(self, name, module, "torch.nn.Linear and torch.nn.Embedding")
        layout_of(self.input_layouts, "input_layouts")
        _no_copies(self.output_layouts)
        sizes = _sizes(_features(module), self.heads, axis, name, self.queries)
        if len(sizes) < axis.size and (
            isinstance(module, torch.nn.Embedding) or self.output_layouts != -1
        ):
            raise PartitionError(
                f"{name!r} has fewer heads than workers; a torch.nn.Linear with output_layouts=-1 "
                f"expected"
            )

    def apply(self, module: Module, axis: Axis) -> Module:
        sizes = _sizes(_features(module), self.heads, axis, "", self.queries)
        output = layout_of(self.output_layouts, "output_layouts")
        if isinstance(module, torch.nn.Embedding):
            return ParallelEmbedding(axis, module, 1, output, sizes)
        kind = ColwiseLinear if len(sizes) == axis.size else SharedColwiseLinear
        return kind(axis, module, layout_of(self.input_layouts, ""), output, sizes)


@dataclass(frozen=True)
class RowwiseParallel(Style):
    """Cut of a `torch.nn.Linear` by input, or of a `torch.nn.Embedding` by words.

    Args:
        input_layouts: layout of the input: by default -1, the features; of an embedding, whose
            indices all workers have, `linop.REPLICATED`.
        output_layouts: layout of the output: `linop.REPLICATED`, by an all-reduce; or a dimension,
            by a reduce-scatter.
        heads: as for `ColwiseParallel`.
    """

    input_layouts: Any = None
    output_layouts: Any = REPLICATED
    heads: int | None = None

    def check(self, module: Module, axis: Axis, name: str) -> None:
        if not _computes_as(module, _CUT):
            _refuse(self, name, module, "torch.nn.Linear and torch.nn.Embedding")
        _no_copies(self.output_layouts)
        _sizes(_rows(module), self.heads, axis, name)

    def apply(self, module: Module, axis: Axis) -> Module:
        sizes = _sizes(_rows(module), self.heads, axis, "")
        output = layout_of(self.output_layouts, "output_layouts")
        if isinstance(module, torch.nn.Embedding):
            return ParallelEmbedding(axis, module, 0, output, sizes)
        given = -1 if self.input_layouts is None else self.input_layouts
        return RowwiseLinear(axis, module, layout_of(given, "input_layouts"), output, sizes)


@dataclass(frozen=True)
class SequenceParallel(Style):
    """A `torch.nn.LayerNorm` or `torch.nn.RMSNorm`, or an elementwise module, on a split sequence.

    Args:
        sequence_dim: the dimension that is split.
        input_layouts, output_layouts: layouts of input and output, by default both split; with
            others the input is cut before, or the output gathered.
    """

    sequence_dim: int = 1
    input_layouts: Any = None
    output_layouts: Any = None

    def check(self, module: Module, axis: Axis, name: str) -> None:
        plain = not [*module.parameters(), *module.children()]
        if type(module) not in (torch.nn.LayerNorm, torch.nn.RMSNorm) and not (
            plain and isinstance(module, ELEMENTWISE)
        ):
            _refuse(
                self, name, module, "torch.nn.LayerNorm, torch.nn.RMSNorm and elementwise modules"
            )
        _no_copies(self.output_layouts)

    def apply(self, module: Module, axis: Axis) -> Module:
        ends = [
            self.sequence_dim if given is None else layout_of(given, "layouts")
            for given in (self.input_layouts, self.output_layouts)
        ]
        norm = isinstance(module, torch.nn.LayerNorm | torch.nn.RMSNorm)
        kind = SequenceNorm if norm else Pointwise
        return kind(axis, module, self.sequence_dim, ends[0], ends[1])


ELEMENTWISE = (
    *(torch.nn.Identity, torch.nn.ReLU, torch.nn.GELU, torch.nn.SiLU, torch.nn.Sigmoid),
    *(torch.nn.Tanh, torch.nn.ELU, torch.nn.LeakyReLU, torch.nn.Softplus),
)


@dataclass(frozen=True)
class PrepareModuleInput(Style):
    """Any module, whose first inputs are converted before its call: once for all modules in it.

    Args:
        input_layouts: layouts of the positional inputs; one alone, of the first.
        desired_input_layouts: those that the module gets, likewise: `linop.COPIES` for modules in
            it that take an input in this layout.
    """

    input_layouts: Any
    desired_input_layouts: Any

    def check(self, module: Module, axis: Axis, name: str) -> None:
        given, wanted = _many(self.input_layouts), _many(self.desired_input_layouts)
        if len(given) != len(wanted):
            raise ArgumentError(
                f"{name!r}: {len(given)} input_layouts and {len(wanted)} desired_input_layouts"
            )

    def apply(self, module: Module, axis: Axis) -> Module:
        pairs = zip(_many(self.input_layouts), _many(self.desired_input_layouts), strict=True)
        _hold(module, "inputs", [Redistribute(axis, given, wanted) for given, wanted in pairs])
        module.register_forward_pre_hook(_convert_inputs)
        return module


@dataclass(frozen=True)
class PrepareModuleOutput(Style):
    """Any module, whose output, one tensor, is converted after its call.

    Args:
        output_layouts: layout of what it computes.
        desired_output_layouts: that of the result.
    """

    output_layouts: Any
    desired_output_layouts: Any

    def check(self, module: Module, axis: Axis, name: str) -> None:
        layout_of(self.output_layouts, "output_layouts")
        layout_of(self.desired_output_layouts, "desired_output_layouts")

    def apply(self, module: Module, axis: Axis) -> Module:
        ends = layout_of(self.output_layouts, ""), layout_of(self.desired_output_layouts, "")
        _hold(module, "output", [Redistribute(axis, *ends)])
        module.register_forward_hook(_convert_output)
        return module


def _hold(module: Module, what: str, converts: list[Redistribute]) -> None:
    """Keep conversions in a module's attributes, where its copies have them too; not as submodules,
    since they have no place in its state."""
    module.__dict__.setdefault(CONVERSIONS, {})[what] = converts


def _convert_inputs(module: Module, args: Any) -> Any:
    converts = module.__dict__[CONVERSIONS]["inputs"]
    if len(args) < len(converts):
        raise ArgumentError(
            f"PrepareModuleInput: {type(module).__name__} called with {len(args)} positional "
            f"inputs; {len(converts)} are converted: pass those by position"
        )
    done = [convert(x) for convert, x in zip(converts, args, strict=False)]
    return (*done, *args[len(done) :])


def _convert_output(module: Module, args: Any, result: Any) -> Any:
    (convert,) = module.__dict__[CONVERSIONS]["output"]
    return convert(result)


CONVERSIONS = "linop_conversions"
"""Attribute of modules with conversions of inputs or outputs."""


def parallel_layers(net: Module) -> list[ParallelLayer]:
    """All parallel modules and conversions in a net."""
    every = list(net.modules())
    for module in net.modules():
        for converts in module.__dict__.get(CONVERSIONS, {}).values():
            every.extend(converts)
    return [module for module in every if isinstance(module, ParallelLayer)]


def _many(layouts: Any) -> Sequence[Layout]:
    many = layouts if isinstance(layouts, tuple | list) else [layouts]
    return [layout_of(one, "input_layouts") for one in many]


def _no_copies(layout: Any) -> None:
    if layout is not None and layout_of(layout, "output_layouts") is COPIES:
        raise ArgumentError(
            "output_layouts=COPIES: a module's output is one tensor; linop.REPLICATED or a "
            "dimension expected"
        )


def _features(module: Any) -> int:
    given = module.out_features if isinstance(module, torch.nn.Linear) else module.embedding_dim
    return int(given)


def _rows(module: Any) -> int:
    given = module.in_features if isinstance(module, torch.nn.Linear) else module.num_embeddings
    return int(given)
