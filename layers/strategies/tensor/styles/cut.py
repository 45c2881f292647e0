"""Styles of a plan: torch's names, with the layouts of this package as their arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Module

from linop.errors import PartitionError
from linop.spaces.decomposition import REPLICATED
from linop.spaces.partition import balanced
from linop.spaces.region import integer
from linop.strategies.mesh import Axis
from linop.strategies.tensor.layouts import layout_of
from linop.strategies.tensor.modules.attention import ParallelAttention
from linop.strategies.tensor.modules.embedding import ParallelEmbedding
from linop.strategies.tensor.modules.linear import (
    ColwiseLinear,
    RowwiseLinear,
    SharedColwiseLinear,
    features,
    is_conv1d,
)
from linop.strategies.tensor.styles.style import CUT, Style, no_copies, refuse


def _computes_as(module: Module, kinds: tuple[Any, ...]) -> bool:
    """True for a module of one of these classes, and of a subclass that computes the same bits from
    the same parameters, as those of timm do."""
    if type(module) in kinds or is_conv1d(module):
        return True
    own = [kind for kind in kinds if isinstance(module, kind)]
    names = {name for name, _ in module.named_parameters()}
    buffers = {name for name, _ in module.named_buffers()}
    if not own or not names <= {"weight", "bias"} or [*module.children()]:
        return False
    if buffers and (buffers != {"embed_scale"} or module.state_dict().keys() != names):
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
        wanted = kind.forward(module, given)
        if kind is torch.nn.Embedding:
            wanted = wanted * getattr(module, "embed_scale", 1)  # of classes of transformers
        return torch.equal(module(given), wanted.to(weight.dtype))


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
        packed: of a projection of several parts, one after the other: their number, if they are
            equally long (3: queries, keys and values; 2: gate and up); or their lengths in any unit
            (``(8, 2, 2)``, heads of queries, keys and values). Every worker has some features of
            each part, of whole heads, if there are any: `heads` is then the number that each part
            is cut by, of grouped queries the number of groups. The program may take the parts by
            the numbers of the sequential module, or of its own.

    Example:
        Each worker has three of six features, and of the result as many:

        >>> import copy
        >>> net, x = torch.nn.Linear(2, 6), torch.ones(4, 2)
        >>> def program(backend):
        ...     tp, style = strategies.Mesh(tp=2)["tp"], strategies.ColwiseParallel()
        ...     mine = strategies.parallelize_module(copy.deepcopy(net), tp, style)
        ...     y = mine(x)
        ...     return tuple(y.shape), torch.allclose(y, net(x).chunk(2, -1)[tp.index], atol=1e-6)
        >>> linop.launch(program, workers=2)
        [((4, 3), True), ((4, 3), True)]
    """

    input_layouts: Any = REPLICATED
    output_layouts: Any = -1
    heads: int | None = None
    queries: int | None = None
    packed: int | Sequence[int] | None = None

    def check(self, module: Module, axis: Axis, name: str) -> None:
        if not _computes_as(module, CUT):
            refuse(self, name, module, "torch.nn.Linear and torch.nn.Embedding")
        layout_of(self.input_layouts, "input_layouts")
        no_copies(self.output_layouts)
        if self.packed is not None:
            self._check_parts(module, axis, name)
            return
        sizes = _sizes(_features(module), self.heads, axis, name, self.queries)
        if len(sizes) < axis.size and (
            isinstance(module, torch.nn.Embedding) or is_conv1d(module) or self.output_layouts != -1
        ):
            raise PartitionError(
                f"{name!r} has fewer heads than workers; a torch.nn.Linear with output_layouts=-1 "
                f"expected"
            )

    def apply(self, module: Module, axis: Axis) -> Module:
        output = layout_of(self.output_layouts, "output_layouts")
        given = layout_of(self.input_layouts, "")
        if self.packed is not None:
            parts = [_sizes(n, self.heads, axis, "") for n in _parts(module, self.packed, "")]
            every = [sum(blocks) for blocks in zip(*parts, strict=True)]
            return ColwiseLinear(axis, module, given, output, every, parts)
        sizes = _sizes(_features(module), self.heads, axis, "", self.queries)
        if isinstance(module, torch.nn.Embedding):
            return ParallelEmbedding(axis, module, 1, output, sizes)
        kind = ColwiseLinear if len(sizes) == axis.size else SharedColwiseLinear
        return kind(axis, module, given, output, sizes)

    def _check_parts(self, module: Module, axis: Axis, name: str) -> None:
        if isinstance(module, torch.nn.Embedding):
            raise PartitionError(
                f"{name!r} is a torch.nn.Embedding; packed= is for projections, torch.nn.Linear"
            )
        if self.output_layouts != -1 or self.queries is not None:
            raise PartitionError(
                f"{name!r}: packed= with output_layouts= or queries=; of parts that workers are to "
                f"have whole, ColwiseParallel(output_layouts=linop.REPLICATED) without packed= "
                f"expected, and of fewer groups than workers too"
            )
        assert self.packed is not None
        for n in _parts(module, self.packed, name):
            _sizes(n, self.heads, axis, name)


def _parts(module: Module, packed: int | Sequence[int], name: str) -> Sequence[int]:
    """Features of each part of a projection.

    Raises:
        PartitionError: features are no such parts.
    """
    many = [packed] if isinstance(packed, int) else [*packed]
    many = [integer(n, f"{name!r}: packed") for n in many]
    units = [1] * many[0] if isinstance(packed, int) else many
    n = _features(module)
    if not units or min(units, default=0) < 1 or n % sum(units):
        raise PartitionError(
            f"{name!r} has {n} features, and packed={packed!r}: the number of equal parts, or "
            f"their lengths in units of which there are a divisor of {n}, expected"
        )
    return [k * (n // sum(units)) for k in units]


@dataclass(frozen=True)
class RowwiseParallel(Style):
    """Cut of a `torch.nn.Linear` by input, or of a `torch.nn.Embedding` by words.

    Args:
        input_layouts: layout of the input: by default -1, the features; of an embedding, whose
            indices all workers have, `linop.REPLICATED`.
        output_layouts: layout of the output: `linop.REPLICATED`, by an all-reduce; or a dimension,
            by a reduce-scatter.
        heads: as for `ColwiseParallel`.

    Example:
        Each worker has three of six features of the input; an all-reduce sums their terms:

        >>> import copy
        >>> net, x = torch.nn.Linear(6, 2), torch.ones(4, 6)
        >>> def program(backend):
        ...     tp, style = strategies.Mesh(tp=2)["tp"], strategies.RowwiseParallel()
        ...     mine = strategies.parallelize_module(copy.deepcopy(net), tp, style, inputs=-1)
        ...     y = mine(x.chunk(2, -1)[tp.index])
        ...     return tuple(mine.weight.shape), torch.allclose(y, net(x), atol=1e-6)
        >>> linop.launch(program, workers=2)
        [((2, 3), True), ((2, 3), True)]
    """

    input_layouts: Any = None
    output_layouts: Any = REPLICATED
    heads: int | None = None

    def check(self, module: Module, axis: Axis, name: str) -> None:
        if not _computes_as(module, CUT):
            refuse(self, name, module, "torch.nn.Linear and torch.nn.Embedding")
        no_copies(self.output_layouts)
        _sizes(_rows(module), self.heads, axis, name)

    def apply(self, module: Module, axis: Axis) -> Module:
        sizes = _sizes(_rows(module), self.heads, axis, "")
        output = layout_of(self.output_layouts, "output_layouts")
        if isinstance(module, torch.nn.Embedding):
            return ParallelEmbedding(axis, module, 0, output, sizes)
        given = -1 if self.input_layouts is None else self.input_layouts
        return RowwiseLinear(axis, module, layout_of(given, "input_layouts"), output, sizes)


@dataclass(frozen=True)
class AttentionParallel(Style):
    """Cut of a `torch.nn.MultiheadAttention` by heads, as those of torch's transformer layers.

    Heads need not divide: of 5 on 2 workers one has 3. Results, also weights, are those of the
    sequential module.

    Args:
        input_layouts: layout of queries, keys and values: `linop.REPLICATED`, `linop.COPIES`, or a
            dimension, as of a sequence.
        output_layouts: layout of the output: `linop.REPLICATED`, by an all-reduce; or a dimension,
            by a reduce-scatter.

    Example:
        Each worker has one head of two:

        >>> import copy
        >>> net, x = torch.nn.MultiheadAttention(4, 2), torch.randn(3, 1, 4)
        >>> def program(backend):
        ...     tp, style = strategies.Mesh(tp=2)["tp"], strategies.AttentionParallel()
        ...     mine = strategies.parallelize_module(copy.deepcopy(net), tp, style)
        ...     return torch.allclose(mine(x, x, x)[0], net(x, x, x)[0], atol=1e-5)
        >>> linop.launch(program, workers=2)
        [True, True]
    """

    input_layouts: Any = REPLICATED
    output_layouts: Any = REPLICATED

    def check(self, module: Module, axis: Axis, name: str) -> None:
        if type(module) is not torch.nn.MultiheadAttention:
            refuse(self, name, module, "torch.nn.MultiheadAttention")
        layout_of(self.input_layouts, "input_layouts")
        no_copies(self.output_layouts)
        whole: Any = module
        _sizes(whole.embed_dim, whole.num_heads, axis, name)

    def apply(self, module: Module, axis: Axis) -> Module:
        ends = layout_of(self.input_layouts, ""), layout_of(self.output_layouts, "")
        heads = balanced(int(module.num_heads), axis.size)  # type: ignore[arg-type]
        return ParallelAttention(axis, module, *ends, heads)


def _features(module: Any) -> int:
    embeds = isinstance(module, torch.nn.Embedding)
    return int(module.embedding_dim) if embeds else features(module)[1]


def _rows(module: Any) -> int:
    embeds = isinstance(module, torch.nn.Embedding)
    return int(module.num_embeddings) if embeds else features(module)[0]
