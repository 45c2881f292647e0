"""Parallel programs to be checked: a model, its sequential twin, a batch and a loss, from a file or
from functions."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from linop.errors import ArgumentError, BackendError

NEEDED = ("twin", "model", "batch", "loss")
OPTIONAL = ("mine", "step", "shard", "optimizer")


@dataclass(frozen=True)
class Program:
    """A parallel program and its sequential twin.

    Args:
        twin: ``twin()`` is the sequential model, the same on every rank.
        model: ``model(twin)`` is this rank's part of the parallel model, with the twin's values in
            tensors of its own.
        batch: ``batch()`` is the whole batch, a tuple of the input and the target.
        loss: ``loss(output, target)`` is the twin's loss, a scalar tensor.
        mine: ``mine(batch, rank, world)`` is this rank's part of the batch; None for all of it.
        step: ``step(model, mine)`` is one step, forward and backward, with everything that the
            program does to gradients before its optimizer; it returns the loss of the whole batch.
            None for ``loss(model(input), target).backward()``.
        shard: ``shard(name, value, rank, world)`` is this rank's part of a parameter of the twin,
            or of its gradient; None where it is to be found from the values.
        optimizer: ``optimizer(parameters)`` is an optimizer; None for SGD with a rate of 0.1.
        world: the number of ranks that the program wants; None for any.
    """

    twin: Callable[[], Any]
    model: Callable[[Any], Any]
    batch: Callable[[], Any]
    loss: Callable[[Any, Any], Any]
    mine: Callable[[Any, int, int], Any] | None = None
    step: Callable[[Any, Any], Any] | None = None
    shard: Callable[[str, Any, int, int], Any] | None = None
    optimizer: Callable[[Any], Any] | None = None
    world: int | None = None


def of_module(module: Any, where: str) -> Program:
    """The program whose parts a module has by their names.

    Raises:
        ArgumentError: one of them is missing, or no function.
    """
    found: dict[str, Any] = {}
    for name in (*NEEDED, *OPTIONAL):
        one = getattr(module, name, None)
        if one is None and name in NEEDED:
            raise ArgumentError(
                f"{where}: no {name!r}; it needs functions {', '.join(NEEDED)} (and may have "
                f"{', '.join(OPTIONAL)}): see linop.testing.check_parallel"
            )
        if one is not None and not callable(one):
            raise ArgumentError(f"{where}: {name!r} is {type(one).__name__}, a function expected")
        found[name] = one
    world = getattr(module, "WORLD", None)
    return Program(**found, world=world if isinstance(world, int) else None)


def of_file(target: str) -> Program:
    """The program of ``FILE.py``, or of ``FILE.py:NAME``, an object in it that has the parts as its
    attributes.

    Raises:
        ArgumentError: there is no such file or name, or a part is missing. Exceptions of the file.
    """
    path, name = parsed(target)
    module = imported(path)
    if not name:
        return of_module(module, str(path))
    found = getattr(module, name, None)
    if found is None:
        raise ArgumentError(f"{path}: no {name!r} in this file")
    if isinstance(found, Program):
        return found
    return of_module(found() if inspect.isclass(found) else found, target)


def parsed(target: str) -> tuple[Path, str]:
    """The file and the name of a target."""
    head, _, name = target.rpartition(":")
    path = Path(target) if not head or target.endswith(".py") else Path(head)
    name = "" if not head or target.endswith(".py") else name
    if not path.is_file():
        raise ArgumentError(
            f"{target!r}: no file {str(path)!r}; give a Python file with functions "
            f"{', '.join(NEEDED)}, as FILE.py or FILE.py:NAME"
        )
    return path, name


def imported(path: Path) -> ModuleType:
    """The module of a file. Exceptions of the file."""
    name = f"linop_checks_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ArgumentError(f"{str(path)!r} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.resolve().parent))
    spec.loader.exec_module(module)
    return module


def world_of(target: str) -> int | None:
    """The number of ranks that ``WORLD`` says, of an object if one is named, else of its file; None
    if there is none. The file is run only if that is no plain number in it."""
    path, name = parsed(target)
    try:
        tree = ast.parse(path.read_bytes(), str(path))  # which say their encoding
    except SyntaxError as error:
        raise ArgumentError(f"{path}: line {error.lineno}: {error.msg}") from None
    bound = [node for node in _at_once(tree) if _binds_world(node)]
    plain: list[Any] = []
    for node in _at_once(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for at, value in (each for one in targets for each in _pairs(one, node.value)):
                if at in bound and isinstance(value, ast.Constant):
                    plain.append(value.value)
    if name and any(map(_binds_world, ast.walk(tree))):
        module = _imported_here(path)
        found = getattr(module, name, None)
        world = found.world if isinstance(found, Program) else getattr(found, "WORLD", None)
        world = getattr(module, "WORLD", None) if world is None else world
    elif len(plain) == len(bound) and len(set(plain)) == 1:
        world = plain[0]
    else:
        world = getattr(_imported_here(path), "WORLD", None) if bound else None
    try:
        number = None if world is None else int(world)
        if number != world and not isinstance(world, str):
            raise ValueError
        return number
    except (TypeError, ValueError, OverflowError):
        raise ArgumentError(f"{target}: WORLD is {world!r}, a number of ranks expected") from None


def _imported_here(path: Path) -> ModuleType:
    """The module of a file, in the process that starts the ranks.

    Raises:
        BackendError: the file cannot be run here.
    """
    try:
        return imported(path)
    except Exception:
        raise BackendError(
            f"{path} failed while its WORLD was looked for (give --workers, or write WORLD as a "
            f"plain number):\n{traceback.format_exc()}"
        ) from None


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """The targets of an assignment, each with what it gets as far as that is written out."""
    yield target, value
    if isinstance(target, ast.Tuple | ast.List) and isinstance(value, ast.Tuple | ast.List):
        if len(target.elts) == len(value.elts):
            for one, other in zip(target.elts, value.elts, strict=True):
                yield from _pairs(one, other)


def _at_once(node: ast.AST) -> Iterator[ast.AST]:
    """The parts of a file that are run when it is imported, but for those of classes."""
    for one in ast.iter_child_nodes(node):
        if not isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            yield one
            yield from _at_once(one)


def _binds_world(node: ast.AST) -> bool:
    """True if a part of a file may give ``WORLD`` a value."""
    match node:
        case ast.Name():
            return node.id == "WORLD" and isinstance(node.ctx, ast.Store)
        case ast.Attribute():
            return node.attr == "WORLD" and isinstance(node.ctx, ast.Store)
        case ast.alias():
            return (node.asname or node.name) in ("WORLD", "*")
        case ast.keyword():
            return node.arg in ("WORLD", "world")
        case ast.Constant():
            return node.value == "WORLD"  # of setattr, or of a dictionary of attributes
    return False
