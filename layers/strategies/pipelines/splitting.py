"""Cuts of a chain of modules into the stages of a pipeline, by names of submodules."""

from __future__ import annotations

import threading
import traceback
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import Module
from torch.utils._pytree import tree_leaves

from linop.errors import ArgumentError
from linop.layers.state.state_tensors import unwrapped
from linop.strategies.pipelines.exported import Stages, graph_of, in_both_modes, stages_of
from linop.strategies.pipelines.exported_calls import CALL, called_often, calls_marked, shared
from linop.strategies.pipelines.exported_state import complete

_MARK = "_linop_piece"
"""Attribute of modules that `split` cut off."""
_SHARED = "_linop_shared"
"""Of a stage: keys of its parameters that other stages have, too."""
_BOUND = "_linop_bound"
"""Of a first stage: dimensions whose lengths in an example are numbers in the graphs, and its
shapes."""
_EXPORTS = threading.Lock()
"""torch exports one module at a time; workers may be threads."""


def split(model: Module, names: Sequence[str], example: Any = None, **inputs: Any) -> list[Module]:
    """Cut a module into stages, whose states have the keys of its `state_dict`.

    A `torch.nn.Sequential` is cut without being run; the stages share its submodules. Other modules
    are exported by torch, for the shape of an example (`torch.distributed.pipelining.pipeline`), in
    training and in evaluation: stages compute as their mode says.
    Any number of tensors may cross a cut, and skip stages: the list then has the edges between the
    stages as its attribute `edges`, from where `Pipeline` takes them. The first stage takes all
    inputs, and passes those on that later ones take, as the words of a decoder. torch exports in
    one thread at a time, while others must not use modules: on threads split before
    `linop.launch`. If the model returns several tensors, in a tuple or a dict, the last stage
    returns a tuple of them. Models of transformers keep no caches there, whatever `use_cache` of
    their configuration says, and compute experts by batched products, which can be exported: loops
    over those that are chosen cannot (`experts_implementation="eager"`).

    Args:
        model: in a Sequential, submodules that are Sequentials may be cut too.
        names: paths of the submodules that the stages after the first begin with, as ``"3"`` or
            ``"encoder.2"``, in the order of the model; of one that the model calls several times,
            as the one layer of ALBERT, with the number of the call, from 0: ``"layer@2"``. Stages
            that call the same module share its parameters, whose gradients `Pipeline` adds.
        example: for modules that are no Sequentials the input of a micro-batch: one, several by
            position in a tuple, or several by name in a dict. All are tensors, or None; what is
            left out keeps its default.
        **inputs: others by name.

    Raises:
        ArgumentError: `model` is no Sequential, and there is no example, or torch cannot export it;
            a name is not that of a submodule (of a Sequential), is the first one, or comes out of
            order; a stage would be empty or run twice, or one after the first takes no tensor;
            several write to one buffer; an input is no tensor; `model` is of torch.compile.

    Example:
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
        >>> first, last = strategies.split(net, ["2"])
        >>> len(first), list(last.state_dict())  # keys of the whole model
        (2, ['2.weight', '2.bias'])
        >>> torch.equal(last(first(torch.ones(1, 2))), net(torch.ones(1, 2)))
        True
    """
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ArgumentError(f"split: a list of names expected, given {names!r}")
    if hasattr(model, "_orig_mod") and hasattr(model, "dynamo_ctx"):
        raise ArgumentError(
            "split: a module that torch.compile has made, whose submodules cannot be told from "
            "one another: split the module itself, and compile its stages, [torch.compile(stage) "
            "for stage in split(model, …)]"
        )
    if isinstance(model, torch.nn.Sequential):
        stages: list[Module] = _split_sequential(model, names)
    elif example is None and not inputs:
        raise ArgumentError(
            f"split: a torch.nn.Sequential expected, given {type(model).__name__}; for another "
            f"module, give an example of its input, or pass a list of stages to the pipeline"
        )
    else:
        stages = _split_exported(model, names, _example(example, inputs))
    keys = tuple(model.state_dict())
    for stage, common in zip(stages, shared(stages), strict=True):
        for mark, value in ((_MARK, keys), (_SHARED, common)):
            setattr(stage, mark, value)
            # Copies of a graph's module keep this, and no other attributes.
            getattr(stage, "meta", {})[mark] = value
    return stages


def keys_of_whole(module: Module) -> Sequence[str] | None:
    """Keys of the state of the model that `split` cut the module off, whose keys its own state has;
    None of another module."""
    inner = unwrapped(module)
    found = getattr(inner, "meta", {}).get(_MARK)
    return getattr(inner, _MARK, found)


def keys_of_several(module: Module) -> Sequence[str]:
    """Keys of a stage's parameters that `split` has given to other stages, too: those of a module
    that the model calls in several of them."""
    inner = unwrapped(module)
    found: Sequence[str] = getattr(inner, _SHARED, getattr(inner, "meta", {}).get(_SHARED, ()))
    return found


def check_shapes(module: Module, shapes: Sequence[Sequence[int]]) -> None:
    """Check inputs of a first stage.

    Raises:
        ArgumentError: its module has numbers of the lengths that it was exported for.
    """
    inner = unwrapped(module)
    found = getattr(inner, _BOUND, getattr(inner, "meta", {}).get(_BOUND))
    if found is None:
        return
    dims, known = found
    given = sorted(map(tuple, shapes))
    if _lengths(known, dims) != _lengths(given, dims):
        some = f"dimension{'s'[: len(dims) > 1]} {', '.join(map(str, dims))}"
        raise ArgumentError(
            f"split: the model was exported for an example of shapes {known}, and computes with "
            f"numbers of their {some}; micro-batches of {given} given: give all of them one size, "
            f"and an example of that to split"
        )


def _lengths(shapes: Sequence[Sequence[int]], dims: Sequence[int]) -> list[tuple[int, ...]]:
    """Lengths of some dimensions."""
    return sorted(tuple(shape[d] for d in dims if d < len(shape)) for shape in shapes)


class _Example(NamedTuple):
    """Inputs of a module, by position and by name."""

    positional: tuple[Any, ...]
    named: dict[str, Any]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The ones that are not None."""
        every = (*self.positional, *self.named.values())
        return [x for x in every if x is not None]


def _example(example: Any, inputs: Mapping[str, Any]) -> _Example:
    by_name = {**example, **inputs} if isinstance(example, Mapping) else dict(inputs)
    by_place = example if type(example) is tuple else ()
    if not isinstance(example, Mapping | tuple) and example is not None:
        by_place = (example,)
    for key, one in [*enumerate(by_place), *by_name.items()]:
        if one is not None and not isinstance(one, torch.Tensor):
            raise ArgumentError(
                f"split: input {key!r} of the example is {type(one)}; a tensor or None expected: "
                f"set other options in the model, as in its configuration"
            )
    # An input that is None is as one that is not there.
    return _Example(by_place, {key: one for key, one in by_name.items() if one is not None})


def _split_exported(model: Module, names: Sequence[str], example: _Example) -> Stages:
    known = [name for name, _ in model.named_modules() if name]
    for name in names:
        if CALL.sub("", name) not in known:
            raise ArgumentError(
                f"split: there is no submodule {name!r} to cut at; there are {', '.join(known)}"
            )
    with _EXPORTS:
        given, other = (
            _exported(model, names, example, mode) for mode in (model.training, not model.training)
        )
    stages = in_both_modes(given, other, model)
    complete([graph_of(stage) for stage in stages], model)
    if dims := sorted({d for one in (given, other) for d in getattr(one, "bound", ())}):
        bound = dims, sorted(tuple(x.shape) for x in example.tensors)
        setattr(stages[0], _BOUND, bound)
        getattr(stages[0], "meta", {})[_BOUND] = bound
    return stages


def _exported(
    model: Module, names: Sequence[str], example: _Example, trains: bool
) -> Stages | ArgumentError:
    """Stages of a module as it computes in a mode, or the reason why there are none."""
    try:
        with _left_as_it_is(model), _exportable(model):
            if model.training != trains:
                model.train(trains)
            return _stages(model, names, example)
    except ArgumentError as error:
        return error


def _stages(model: Module, names: Sequence[str], example: _Example) -> Stages:
    from torch.distributed.pipelining import SplitPoint, pipeline

    others = [] if model.training else [*_longer(model, example)]  # torch changes the model
    begins = dict.fromkeys(calls_marked(model, names), SplitPoint.BEGINNING)
    try:
        cut = pipeline(model, *example, split_spec=begins)
    except Exception as error:
        raise ArgumentError(f"split: torch cannot export the module: {_reason(error)}") from error
    if cut.num_stages != len(names) + 1:
        raise ArgumentError(
            f"split: {cut.num_stages} stages, not {len(names) + 1}, begin at {names}"
            f"{called_often(cut.split_gm, names)}"
        )
    bound = [dim for dim, other, wanted in others if not _computes(cut, other, wanted)]
    stages = stages_of(cut, model)
    stages.bound = bound
    return stages


def _longer(model: Module, example: _Example) -> Iterator[tuple[int, _Example, Any]]:
    """Dimensions, an example that is one longer there, and the model's results for it, where it
    has some: tensors are longer that are as long as the first one."""
    # On a GPU an index beyond a table, as of positions, is no exception, but ends the process.
    most = None if all(x.device.type in ("cpu", "meta") for x in example.tensors) else 1
    for dim in range(max((x.ndim for x in example.tensors), default=0))[:most]:
        long = next(x.shape[dim] for x in example.tensors if x.ndim > dim)

        def longer(x: Any, dim: int = dim, long: int = long) -> Any:
            there = isinstance(x, torch.Tensor) and x.ndim > dim and x.shape[dim] == long
            return torch.cat([x, x.narrow(dim, 0, 1)], dim) if there else x

        if not long:
            continue
        named = {name: longer(x) for name, x in example.named.items()}
        other = _Example(tuple(map(longer, example.positional)), named)
        try:
            with torch.no_grad():
                wanted = model(*other.positional, **other.named)
        except Exception:  # of whatever the user's module does
            continue
        yield dim, other, wanted


def _computes(cut: Module, example: _Example, wanted: Any) -> bool:
    """True if a module that torch exported computes these results, for other sizes than those that
    it was exported for; of tensors without values, if it computes their shapes."""
    try:
        with torch.no_grad():
            found = tree_leaves(cut(*example.positional, **example.named))
    except Exception:  # of torch, where a shape was a number
        return False
    pairs = zip(found, tree_leaves(wanted), strict=False)
    return all(
        a.shape == b.shape
        and (a.is_meta or b.is_meta or torch.allclose(a, b, 1e-3, 1e-3, equal_nan=True))
        for a, b in pairs
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
    )


def _reason(error: BaseException) -> str:
    """The first cause of an error of torch's export, and the line of the model that has it."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = str(error).strip().partition("\n\n")[0]
    theirs = str(Path(torch.__file__).parent), str(Path(__file__).parent)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((*theirs, "<")):
            where = f"{Path(frame.filename).name}:{frame.lineno}, in {frame.name}"
            return f"{type(error).__name__}: {text} (at {where}: {frame.line})"
    return f"{type(error).__name__}: {text}"


_EXPORTABLE = {"use_cache": (True, False), "_experts_implementation": ("eager", "batched_mm")}
"""Options of configurations, their values that cannot be exported, and others: caches are what a
stage could not return; loops over experts depend on numbers in tensors."""


@contextmanager
def _exportable(model: Module) -> Iterator[None]:
    """Context in which models of transformers, by their configurations, compute the same in another
    way, which torch can export."""
    found = {id(one): one for m in model.modules() if (one := getattr(m, "config", None))}
    changed = [
        (one, key, before)
        for one in found.values()
        for key, (before, _) in _EXPORTABLE.items()
        if getattr(one, key, None) == before
    ]
    for one, key, _ in changed:
        setattr(one, key, _EXPORTABLE[key][1])
    try:
        yield
    finally:
        for one, key, before in changed:
            setattr(one, key, before)


@contextmanager
def _left_as_it_is(model: Module) -> Iterator[None]:
    """Context of exports: torch replaces `forward` of the submodules at which stages begin."""
    changed = "forward", "_orig_forward", "training"
    before = [(vars(m), {k: vars(m)[k] for k in changed if k in vars(m)}) for m in model.modules()]
    try:
        yield
    finally:
        for own, kept in before:
            for key in changed:
                own.pop(key, None)
            own.update(kept)


def _split_sequential(model: Module, names: Sequence[str]) -> list[Module]:
    pieces, rest, before = [], model, ""
    for name in names:
        if not _has(model, name):
            known = ", ".join(key for key, _ in model.named_modules() if key and _has(model, key))
            raise ArgumentError(
                f"split: there is no submodule {name!r} to cut at; there are {known}"
            )
        if not _has(rest, name):
            after = f"comes before {before!r}" if before else "is no submodule"
            raise ArgumentError(
                f"split: {name!r} {after}; names in the order of the model expected"
            )
        head, rest = _cut(rest, name.split("."))
        if not any(True for _ in _leaves(head)):
            raise ArgumentError(f"split: no submodule is left for the stage before {name!r}")
        pieces.append(head)
        before = name
    return [*pieces, rest if names else torch.nn.Sequential(OrderedDict(_children(model)))]


def _has(model: Module, name: str) -> bool:
    for part in name.split("."):
        child = model._modules.get(part) if isinstance(model, torch.nn.Sequential) else None
        if child is None:
            return False
        model = child
    return True


def _leaves(model: Module) -> Any:
    """Submodules that are no Sequentials."""
    for child in model.children():
        yield from _leaves(child) if isinstance(child, torch.nn.Sequential) else (child,)


def _cut(model: Module, path: Sequence[str]) -> tuple[Module, Module]:
    """The submodules before one of them, and the others, under their names."""
    name, *inner = path
    children = _children(model)
    at = [key for key, _ in children].index(name)
    head, rest = children[:at], children[at:]
    if inner:
        first, second = _cut(children[at][1], inner)
        head = [*head, (name, first)]
        rest = [(name, second), *children[at + 1 :]]
    return torch.nn.Sequential(OrderedDict(head)), torch.nn.Sequential(OrderedDict(rest))


def _children(model: Module) -> list[tuple[str, Module]]:
    """Submodules of a Sequential: `named_children` has one that comes twice once."""
    return [(key, child) for key, child in model._modules.items() if child is not None]
