"""`parallelize_module`: named submodules replaced by parallel ones, which have their values."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch.nn import Module

from linop.backends import use
from linop.errors import ArgumentError, BackendError, PartitionError, expect
from linop.layers.agreement.arguments import digest
from linop.layers.agreement.input_agreement import agreement_of
from linop.spaces.decomposition import REPLICATED
from linop.strategies import sequential
from linop.strategies.mesh import Axis
from linop.strategies.tensor.calls import Calls
from linop.strategies.tensor.chains import check_chains
from linop.strategies.tensor.conversions import parallel_layers
from linop.strategies.tensor.layouts import Layout, layout_of
from linop.strategies.tensor.modules.layer import ParallelLayer
from linop.strategies.tensor.modules.pieces import pieces_of
from linop.strategies.tensor.styles.cut import ColwiseParallel, RowwiseParallel, check_groups
from linop.strategies.tensor.styles.low_rank import has_low_rank, styles_of_parts
from linop.strategies.tensor.styles.of_torch import is_torchs, translated
from linop.strategies.tensor.styles.style import Style

_Said = Mapping[str, Mapping[str, Any]]
"""A worker's plan, module and arguments, of which each part has a text, or a tuple."""


def parallelize_module(
    module: Module,
    axis: Axis,
    plan: Style | Mapping[str, Style],
    *,
    inputs: Any = REPLICATED,
    example: Any = None,
    shards: int | None = None,
) -> Module:
    """Make a sequential module parallel over an axis of a mesh. Collective among its workers.

    Named submodules are replaced by parallel ones, with their blocks of the values, so that
    state_dict keys stay; `linop.layers.gather_state`, `scatter_state`, `save` and `load` convert to
    and from the state of the sequential module. All others compute what they did, on every worker.
    At a call of the net with new shapes its workers follow the layout of each tensor, and raise if
    modules do not fit together. After an error here the module is as it was.

    Args:
        module: the module; all workers have the same, with the same values. It is changed.
        axis: ``mesh["tp"]``.
        plan: a style for each submodule, by name; ``*`` stands for any part of a name between
            dots. Or one style, for the module itself. Those of torch.distributed.tensor.parallel
            are taken as linop's of the same names.
        inputs: layout of the module's own inputs.
        example: an input of the module, or a tuple of all inputs; with it the module is run once,
            so that errors of the plan are raised here.
        shards: a power of two: parallel modules compute in so many parts of one size, whatever the
            number of workers, which divides it, and sums are in a binary tree over these. With
            ``sums="tree"`` the net has the same bits on any such number of workers, if each tensor
            of layout COPIES goes into one parallel module (docs/exact_sums.md). None: one part a
            worker.

    Returns:
        The module; its replacement, if `plan` is one style.

    Raises:
        ArgumentError, PartitionError: the plan names no submodule; a style is not for such a
            module, or the module that is to be replaced has hooks; there are fewer heads than
            workers; parameters that are one are cut in different ways; layouts along a
            `torch.nn.Sequential` do not fit together, or, with an example, of any modules.
            BackendError: workers have different modules, or other arguments. All on every worker,
            also where one alone has such an argument.

    Example:
        Each worker has three hidden features of six, and the result of all:

        >>> import copy
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2))
        >>> plan = {"0": strategies.ColwiseParallel(), "2": strategies.RowwiseParallel()}
        >>> x = torch.ones(4, 2)
        >>> def program(backend):
        ...     tp = strategies.Mesh(tp=2)["tp"]
        ...     mine = strategies.parallelize_module(copy.deepcopy(net), tp, plan)
        ...     return tuple(mine[0].weight.shape), torch.allclose(mine(x), net(x), atol=1e-6)
        >>> linop.launch(program, workers=2)
        [((3, 2), True), ((3, 2), True)]
    """
    axis, what = expect("parallelize_module: axis", axis, Axis), "parallelize_module"

    def checked() -> tuple[tuple[Layout, dict[str, Style]], _Said]:
        layout = layout_of(inputs, "inputs")
        styles = _named(expect("module", module, torch.nn.Module), plan)
        for name, style in styles.items():
            style.check(module.get_submodule(name), axis, name)
            _check_hooks(module.get_submodule(name), style, name)
        check_groups(styles, axis)
        given = {"inputs": repr(layout), "example": _kinds(example), "shards": repr(shards)}
        pieces_of(shards, axis, what)
        return (layout, styles), {**_description(module, styles), "argument": given}

    agreement = agreement_of(axis.backend)
    (inputs, styles), said = agreement.together(checked, what, f"call {what}")
    _compare(axis, said)
    before = sequential.outline(module)
    with use(axis.backend), _all_or_nothing(module):
        module = _replaced(module, axis, styles)
        sequential.keep(module, before)
        if pieces := pieces_of(shards, axis, what):
            _cut(module, pieces)
        check_chains(module, inputs)
        calls = Calls(module, axis, inputs)
        for layer in parallel_layers(module):
            layer.calls = layer.calls or calls
        if example is not None:
            module(*example) if isinstance(example, tuple) else module(example)
    return module


@contextmanager
def _all_or_nothing(module: Module) -> Iterator[None]:
    """Context of changes of a module, which are undone at an error: of its submodules, hooks and
    other attributes."""
    before = [
        (one, {key: (x, copy(x) if isinstance(x, dict) else x) for key, x in vars(one).items()})
        for one in module.modules()
    ]
    try:
        yield
    except BaseException:
        for one, attributes in before:
            for value, was in attributes.values():
                if isinstance(value, dict) and value != was:
                    value.clear()
                    value.update(was)
            vars(one).clear()
            vars(one).update((key, value) for key, (value, _) in attributes.items())
        raise


def _named(module: Module, plan: Any) -> dict[str, Style]:
    """The style of each submodule, in the order of the plan."""
    given = {"": plan} if isinstance(plan, Style) or is_torchs(plan) else plan
    if not isinstance(given, Mapping):
        raise ArgumentError(f"plan: a style, or styles by name, expected; given {plan!r}")
    names = [name for name, _ in module.named_modules()]
    if not given:
        raise ArgumentError(
            f"plan: styles of submodules expected, given none; there are "
            f"{', '.join(filter(None, names))}"
        )
    found: dict[str, Style] = {}
    for pattern, style in given.items():
        expect("plan: name of a submodule", pattern, str)
        if not isinstance(style, Style) and not is_torchs(style):
            raise ArgumentError(
                f"{pattern!r}: {style!r} given; ColwiseParallel(), RowwiseParallel(), "
                f"SequenceParallel() or PrepareModuleInput(…) of linop.strategies, or of "
                f"torch.distributed.tensor.parallel, expected"
            )
        fitting = [name for name in names if _fits(name, pattern)]
        if not fitting:
            raise ArgumentError(
                f"there is no submodule {pattern!r}; there are {', '.join(filter(None, names))}"
            )
        for name in fitting:
            one = module.get_submodule(name)
            own = translated(style, one, name) if is_torchs(style) else style
            low = has_low_rank(one) and isinstance(own, ColwiseParallel | RowwiseParallel)
            found.update(styles_of_parts(name, one, own) if low else {name: own})
    return found


def _fits(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    both = len(parts) == len(wanted) and bool(name) == bool(pattern)
    return both and all(map(fnmatchcase, parts, wanted))


def _check_hooks(module: Module, style: Style, name: str) -> None:
    """Check that nothing is lost where a module is replaced.

    Raises:
        ArgumentError: it has hooks, or a parameter of it has, as those of a weight norm.
    """
    if style.keeps(module):
        return
    for owner in (module, *module.parameters()):
        keys = [*vars(owner), "_backward_hooks", "_post_accumulate_grad_hooks"]
        if any(getattr(owner, key, None) for key in keys if key.endswith("_hooks")):
            raise ArgumentError(
                f"{name!r} has hooks, or a parameter of it has; its replacement would not have "
                f"them: register hooks afterwards"
            )


def _description(module: Module, styles: Mapping[str, Style]) -> _Said:
    """The items of a module and a plan that workers compare."""
    modules = {
        name or "the module itself": (
            re.sub(" at 0x[0-9a-f]+", "", f"{type(one).__name__}({one.extra_repr()})")
            + (" in training" if one.training else " in evaluation")
        )
        for name, one in module.named_modules()
    }
    tensors = {
        name: (tuple(x.shape), str(x.dtype), "trained" if x.requires_grad else "frozen", digest(x))
        for name, x in [*module.named_parameters(), *module.named_buffers()]
    }
    plan = {name: repr(style) for name, style in styles.items()}
    return {"plan": plan, "module": {**tensors, **modules}}


def _cut(module: Module, pieces: int) -> None:
    """Let parallel modules compute in pieces.

    Raises:
        ArgumentError: one cannot.
    """
    for layer in parallel_layers(module):
        layer.cut_into(pieces)


def _kinds(example: Any) -> str:
    """An example, in words: without its shapes, which blocks of one tensor may differ in."""
    leaves = example if isinstance(example, tuple) else (example,)
    each = (
        f"{x.ndim}-dimensional {x.dtype}" if isinstance(x, torch.Tensor) else repr(x)
        for x in leaves
    )
    return ", ".join(each)


def _compare(axis: Axis, said: Sequence[_Said]) -> None:
    """Check that all workers make the same module parallel in the same way."""
    for worker, theirs in enumerate(said):
        for what, one in said[0].items():
            other = theirs[what]
            for name in [*one, *other]:
                if one.get(name) != other.get(name):
                    raise BackendError(
                        f"parallelize_module: workers 0 and {worker} of {axis.name!r} have another "
                        f"{what} at {name!r}: {_brief(one, name)} and {_brief(other, name)}; the "
                        f"same expected, with the same values"
                    )


def _brief(said: Mapping[str, Any], name: str) -> str:
    if name not in said:
        return "nothing"
    return (
        said[name] if isinstance(said[name], str) else f"{said[name][:-1]}, {said[name][-1][:8]}…"
    )


def _replaced(module: Module, axis: Axis, styles: Mapping[str, Style]) -> Module:
    """The module with parallel submodules. Parameters that were one stay one."""
    made = {name: style.apply(module.get_submodule(name), axis) for name, style in styles.items()}
    firsts: dict[int, tuple[str, str]] = {}
    for path, p in module.named_parameters(remove_duplicate=False):
        name, _, key = path.rpartition(".")
        before = firsts.setdefault(id(p), (name, key))
        if before != (name, key):
            _tie(before, (name, key), made)
    for name, one in made.items():
        whole = module.get_submodule(name)
        if one is whole:
            continue
        if not name:
            return one.train(whole.training)
        parent, _, last = name.rpartition(".")
        setattr(module.get_submodule(parent), last, one.train(whole.training))
    return module


def _tie(first: tuple[str, str], other: tuple[str, str], made: Mapping[str, Module]) -> None:
    """Make parameters of two modules one, as they were.

    Args:
        first, other: name of the module, and that of its parameter.

    Raises:
        PartitionError: they are cut in different ways.
    """
    one, two = (made.get(name) for name, _ in (first, other))
    ways = [
        (module.spaces[key].made_from, getattr(module, "packings", {}).get(key))
        if isinstance(module, ParallelLayer)
        else None
        for module, (_, key) in ((one, first), (two, other))
    ]
    if ways[0] != ways[1]:
        raise PartitionError(
            f"parallelize_module: {'.'.join(first)!r} and {'.'.join(other)!r} are one parameter, "
            f"and would be cut in different ways; cut both in the same way, as an embedding by "
            f"RowwiseParallel() and the last projection by ColwiseParallel()"
        )
    if ways[0] is not None:
        setattr(two, other[1], getattr(one, first[1]))
