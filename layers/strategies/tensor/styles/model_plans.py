"""Plans of models of `transformers`, of their own ``tp_plan``, in styles of this package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch.nn import Module

from linop.errors import ArgumentError, expect
from linop.spaces.decomposition import REPLICATED
from linop.strategies.mesh import Axis
from linop.strategies.tensor.modules.linear import features, is_conv1d
from linop.strategies.tensor.styles.cut import ColwiseParallel, RowwiseParallel
from linop.strategies.tensor.styles.kept import SequenceParallel
from linop.strategies.tensor.styles.style import Style

_STYLES: Mapping[str, Callable[..., Style]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=REPLICATED),
    "colwise_rep": lambda: ColwiseParallel(output_layouts=REPLICATED),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=REPLICATED),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=REPLICATED),
    "embedding_rowwise": RowwiseParallel,
    "embedding_colwise": lambda: ColwiseParallel(output_layouts=REPLICATED),
    "packed_colwise": lambda: ColwiseParallel(packed=2),
    "replicated_with_grad_allreduce": lambda: SequenceParallel(None),
    "sequence_parallel": SequenceParallel,
}
"""By the names of `transformers`. Modules under others, as experts, stay whole on every worker."""


def tp_plan(model: Module, axis: Axis) -> dict[str, Style]:
    """The plan that a model of `transformers` has, for `parallelize_module`; to be changed as any
    dictionary: ``{**tp_plan(model, axis), "lm_head": …}``.

    Projections of attention are cut in whole heads, and of grouped queries in whole groups; where
    there are fewer than workers, weights are cut, and every worker computes with all heads. Fused
    projections (``qkv_proj``, ``gate_up_proj``), which `transformers` gathers, are cut part by
    part. An embedding that is one with the last projection is cut with it.

    Args:
        model: the sequential model. Nothing is changed.
        axis: ``mesh["tp"]``.

    Raises:
        ArgumentError: the model has no plan.

    Example:
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2))
        >>> net._tp_plan = {"0": "colwise", "2": "rowwise"}  # as models of transformers have it
        >>> def program(backend):
        ...     return strategies.tp_plan(net, strategies.Mesh(tp=2)["tp"])
        >>> plan = linop.launch(program, workers=2)[0]
        >>> {name: type(style).__name__ for name, style in plan.items()}
        {'0': 'ColwiseParallel', '2': 'RowwiseParallel'}
    """
    expect("tp_plan: model", model, Module), expect("tp_plan: axis", axis, Axis)
    given = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    if not isinstance(given, Mapping) or not given:
        raise ArgumentError(
            f"tp_plan: {type(model).__name__} has no plan of its own (base_model_tp_plan of its "
            f"configuration, or _tp_plan); give parallelize_module styles by name"
        )
    modules = {name: one for name, one in model.named_modules() if name}
    found: dict[str, Style] = {}
    for pattern, kind in given.items():
        names = [name for name in modules if _fits(name, pattern)]
        kinds = (torch.nn.Linear, torch.nn.Embedding)
        for name in names:
            one = modules[name]
            plain = isinstance(one, kinds) or is_conv1d(one) or "colwise" not in kind
            if kind in _STYLES and plain:
                found[name] = _STYLES[kind]()
    _cut_fused(found, modules)
    _cut_heads(found, modules, axis)
    _cut_tied(found, modules)
    return found


def _fits(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _cut_fused(found: dict[str, Style], modules: Mapping[str, Any]) -> None:
    """Cut projections of several parts part by part, and what they lead to by input."""
    for name in [*found]:
        owner, _, last = name.rpartition(".")
        after = {"qkv_proj": "o_proj", "gate_up_proj": "down_proj"}.get(last)
        if after is None or f"{owner}.{after}" not in found:
            continue
        packed: Any = 2
        if last == "qkv_proj":
            counts = _counts(modules[owner], modules[name], modules[f"{owner}.{after}"])
            if counts is None:
                continue
            packed = counts
        found[name] = ColwiseParallel(packed=packed)
        found[f"{owner}.{after}"] = RowwiseParallel()


def _counts(attention: Any, qkv: Any, o: Any) -> tuple[int, int, int] | None:
    """Heads of queries, keys and values of a fused projection; None if they are not known."""
    width = getattr(attention, "head_dim", None)
    if not isinstance(width, int) or features(o)[0] % width:
        return None
    heads, every = features(o)[0] // width, features(qkv)[1] // width
    return None if (every - heads) % 2 else (heads, (every - heads) // 2, (every - heads) // 2)


def _cut_heads(found: dict[str, Style], modules: Mapping[str, Any], axis: Axis) -> None:
    """Cut the projections of each attention in whole heads."""
    owners = dict.fromkeys(name.rpartition(".")[0] for name in found)
    for owner in owners:
        width = getattr(modules.get(owner), "head_dim", None)
        if not isinstance(width, int) or not width:
            continue
        cut: dict[str, int] = {}
        for name, style in found.items():
            if name.rpartition(".")[0] != owner or not isinstance(modules[name], torch.nn.Linear):
                continue
            if isinstance(style, ColwiseParallel) and style.output_layouts == -1:
                cut[name] = features(modules[name])[1]
            if isinstance(style, RowwiseParallel) and style.input_layouts is None:
                cut[name] = features(modules[name])[0]
        if any(n % width for n in cut.values()):
            continue
        counts = {name: n // width for name, n in cut.items()}
        for name, style in [(name, found[name]) for name in cut]:
            if isinstance(style, ColwiseParallel) and not isinstance(style.packed, int | None):
                counts[name] = style.packed[-1]
        groups = min(counts.values(), default=axis.size)
        for name in counts:
            found[name] = _in_heads(found[name], groups, axis.size)
        if groups < axis.size:  # norms of queries and keys have all heads
            for name in [n for n in found if n.rpartition(".")[0] == owner and n not in counts]:
                del found[name]


def _in_heads(style: Style, groups: int, workers: int) -> Style:
    """A style in whole heads; of fewer groups than workers, of which the attention of
    `transformers` has a fixed number, weights are cut, and every worker has all heads."""
    if isinstance(style, RowwiseParallel):
        fits = groups >= workers
        return RowwiseParallel(heads=groups) if fits else RowwiseParallel(input_layouts=REPLICATED)
    if groups < workers:
        return ColwiseParallel(output_layouts=REPLICATED)
    return ColwiseParallel(heads=groups, packed=getattr(style, "packed", None))


def _cut_tied(found: dict[str, Style], modules: Mapping[str, Any]) -> None:
    """Cut an embedding that is one with a projection that is cut by output."""
    cut = {id(modules[n].weight) for n, s in found.items() if isinstance(s, ColwiseParallel)}
    for name, one in modules.items():
        if isinstance(one, torch.nn.Embedding) and id(one.weight) in cut and name not in found:
            found[name] = RowwiseParallel()
