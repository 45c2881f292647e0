"""A fault: a function, an expression or statement in it, and what takes its place.

Places are found in the syntax tree: a fault stands whatever the formatting, the comments and the
other lines of its file are. The statement around it is written anew where the fault is planted;
all else stays as it is.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FOLDERS = {"backends": "backends", "layers": "layers", "strategies": "layers/strategies"}
"""Packages of linop whose folders are not in `linop/`."""

KINDS = {
    "address": "the wrong element, box, worker or root",
    "agreement": "one worker decides alone",
    "aliasing": "memory that is in use is handed out or written to",
    "blind": "a check that accepts what is wrong",
    "boundary": "off by one, or < in place of <=",
    "conjugation": "a complex conjugate that is missing or too many",
    "coefficient": "a factor, sign or count that is wrong",
    "local": "of a block, where the whole is meant",
    "memory": "the wrong kind of memory, or none of its own",
    "omission": "a step or a term that is left out",
    "order": "factors, dimensions or messages in the wrong order",
    "overwriting": "set where it should be added, or the reverse",
    "precision": "rounded, or beyond the range of its type",
    "replication": "copies and replicas confused",
    "synchronisation": "read or written before its time",
}
"""Kinds of mistakes; each has at least one fault."""


class PlaceError(ValueError):
    """A fault's place is not in the tree."""


@dataclass(frozen=True)
class Fault:
    """A change of one expression or statement."""

    name: str
    says: str
    """The fault, in words."""
    kind: str
    """One of `KINDS`."""
    place: str
    """``module:qualified.name`` of the function; classes and functions inside functions are parts
    of the name."""
    before: str
    """The expression or statement that is replaced; the function has it once."""
    after: str
    tests: tuple[str, ...]
    """Names of test files of adjoint_tests, or of tests in them, that are to notice it, in this
    order."""

    @property
    def file(self) -> str:
        """The module's file, from the tree's root."""
        _, *parts = self.place.partition(":")[0].split(".")
        return "/".join([FOLDERS.get(parts[0], f"linop/{parts[0]}"), *parts[1:]]) + ".py"

    def planted(self, root: Path) -> str:
        """The file's text with the fault in it.

        Args:
            root: the tree's root.

        Raises:
            PlaceError: the file, the function or the expression is not there, or the expression is
                there several times.
        """
        name = self.place.partition(":")[2]
        path = root / self.file
        if not path.is_file():
            raise self._missing(f"there is no file {self.file}", root)
        source = path.read_text()
        tree = ast.parse(source, self.file)
        function = _definition(tree, name)
        if function is None:
            raise self._missing(f"{self.file} has no {name}", root)
        before = parsed(self.before)
        found = [node for node in ast.walk(function) if same(node, before)]
        if len(found) != 1:
            raise PlaceError(
                f"{self.name}: {self.place} has {self.before!r} {len(found)} times; once expected: "
                f"mend or remove the fault in adjoint_tests/mutation/faults/"
            )
        return _replaced(source, tree, found[0], parsed(self.after))

    def _missing(self, what: str, root: Path) -> PlaceError:
        name = self.place.partition(":")[2]
        files = (
            f
            for folder in ("linop", "backends", "layers")
            for f in sorted((root / folder).rglob("*.py"))
        )
        hints = [
            f.relative_to(root).as_posix()
            for f in files
            if _definition(ast.parse(f.read_text()), name)
        ]
        hint = f"; {', '.join(hints)} has {name}" if hints else ""
        return PlaceError(
            f"{self.name}: {what}{hint}: mend or remove the fault in adjoint_tests/mutation/faults/"
        )


def parsed(text: str) -> ast.AST:
    """The expression, or the statement, that a text is."""
    try:
        return ast.parse(text, mode="eval").body
    except SyntaxError:
        (statement,) = ast.parse(text).body
        return statement


def same(a: ast.AST, b: ast.AST) -> bool:
    """True for equal syntax, wherever it stands."""
    return type(a) is type(b) and ast.dump(a) == ast.dump(b)


def _definition(tree: ast.AST, name: str) -> ast.AST | None:
    """The function or class of a qualified name."""
    first, _, rest = name.partition(".")
    for node in _own_definitions(tree):
        if node.name == first:
            return _definition(node, rest) if rest else node
    return None


def _own_definitions(
    tree: ast.AST,
) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """Definitions in a body, those in its branches and loops included."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node
        else:
            yield from _own_definitions(node)


def _replaced(source: str, tree: ast.AST, old: ast.AST, new: ast.AST) -> str:
    """The source with the statement around a node written anew."""
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    lines = source.splitlines(keepends=True)
    statement = old
    while not (isinstance(statement, ast.stmt) and _begins_a_line(statement, lines)):
        statement = parents[statement]
    first, last = statement.lineno, statement.end_lineno
    assert last is not None
    for decorator in getattr(statement, "decorator_list", ()):
        first = min(first, decorator.lineno)
    # Nested as deep as it was: indenting its text would change strings of several lines.
    depth = statement.col_offset // 4
    nested = _Replacing(old, new).visit(statement)
    for _ in range(depth):
        nested = ast.If(ast.Constant(1), [nested], [])
    text = ast.unparse(nested).split("\n", depth)[depth]
    return "".join([*lines[: first - 1], text, "\n", *lines[last:]])


def _begins_a_line(statement: ast.stmt, lines: list[str]) -> bool:
    """False for an ``elif``, and for what follows a colon or a semicolon."""
    line = lines[statement.lineno - 1].encode()
    before, text = line[: statement.col_offset], line[statement.col_offset :]
    return not before.strip() and not text.startswith(b"elif")


class _Replacing(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self._old, self._new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self._new if node is self._old else super().visit(node)
