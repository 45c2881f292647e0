"""`parallelize_module`: named submodules replaced by parallel ones, which have their values."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from linop.backends import use
from linop.errors import ArgumentError, BackendError, PartitionError
from linop.layers.agreement.arguments import digest
from linop.layers.agreement.input_agreement import agreement_of
from linop.spaces.decomposition import REPLICATED
from linop.strategies.mesh import Axis
from linop.strategies.tensor.calls import Calls
from linop.strategies.tensor.chains import check_chains
from linop.strategies.tensor.layer import ParallelLayer
from linop.strategies.tensor.layouts import layout_of
from linop.strategies.tensor.styles import Style, parallel_layers

Module = Any
"""torch is not typed here."""


def parallelize_module(
    module: Module,
    axis: Axis,
    plan: Style | Mapping[str, Style],
    *,
    inputs: Any = REPLICATED,
    example: Any = None,
) -> Module:
    """Make a sequential module parallel over an axis of a mesh. Collective among its workers.

    Named submodules are replaced by parallel ones, with their blocks of the values, so that
    state_dict keys stay; `linop.layers.gather_state`, `scatter_state`, `save` and `load` convert to
    and from the state of the sequential module. All others compute what they did, on every worker.
    At a call of the net with new shapes its workers follow the layout of each tensor, and raise if
    modules do not fit together.

    Args:
        module: the module; all workers have the same, with the same values. It is changed.
        axis: ``mesh["tp"]``.
        plan: a style for each submodule, by name; ``*`` stands for any part of a name between
            dots. Or one style, for the module itself.
        inputs: layout of the module's own inputs.
        example: an input of the module, or a tuple of all inputs; with it the module is run once,
            so that errors of the plan are raised here.

    Returns:
        The module; its replacement, if `plan` is one style.

    Raises:
        ArgumentError, PartitionError: the plan names no submodule; a style is not for such a
            module; there are fewer heads than workers; parameters that are one are cut in different
            ways; layouts along a `torch.nn.Sequential` do not fit together, or, with an example, of
            any modules. BackendError: workers have different modules. All on every worker.
    """
    inputs = layout_of(inputs, "inputs")
    styles = _named(module, plan)
    for name, style in styles.items():
        style.check(module.get_submodule(name), axis, name)
    _compare(module, axis, styles)
    with use(axis.backend):
        module = _replaced(module, axis, styles)
        check_chains(module, inputs)
        calls = Calls(module, axis.backend, inputs)
        for layer in parallel_layers(module):
            layer.calls = layer.calls or calls
        if example is not None:
            module(*example) if isinstance(example, tuple) else module(example)
    return module


def _named(module: Module, plan: Any) -> dict[str, Style]:
    """The style of each submodule, in the order of the plan."""
    given = {"": plan} if isinstance(plan, Style) else dict(plan)
    names = [name for name, _ in module.named_modules()]
    found: dict[str, Style] = {}
    for pattern, style in given.items():
        if not isinstance(style, Style):
            raise ArgumentError(
                f"parallelize_module: {pattern!r}: {style!r} given; ColwiseParallel(), "
                f"RowwiseParallel(), SequenceParallel() or PrepareModuleInput(…) expected"
            )
        fitting = [name for name in names if _fits(name, pattern)]
        if not fitting:
            raise ArgumentError(
                f"parallelize_module: there is no submodule {pattern!r}; there are "
                f"{', '.join(filter(None, names))}"
            )
        found.update(dict.fromkeys(fitting, style))
    return found


def _fits(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    both = len(parts) == len(wanted) and bool(name) == bool(pattern)
    return both and all(map(fnmatchcase, parts, wanted))


def _compare(module: Module, axis: Axis, styles: Mapping[str, Style]) -> None:
    """Check that all workers make the same module parallel in the same way."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    mine = {name: repr(style) for name, style in styles.items()}
    values = {name: (tuple(x.shape), str(x.dtype), digest(x)) for name, x in tensors}
    own: dict[str, Mapping[str, Any]] = {"plan": mine, "module": values}
    said = agreement_of(axis.backend).gather_objects(own, "call parallelize_module")
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
    return said[name] if isinstance(said[name], str) else f"{said[name][:2]}, {said[name][2][:8]}…"


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
        module.spaces[key].made_from if isinstance(module, ParallelLayer) else None
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
