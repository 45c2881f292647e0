"""Programs that are read as text: their setup is run, their calls of solvers one by one.

PyLops-MPI's tutorials are scripts, ours are functions ``main(backend)``. Statements that solve are
those that assign to given names; statements that need their results are left out, as are pictures.
"""

from __future__ import annotations

import ast
import copy
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

PICTURES = {"plt", "fig", "axs", "fig1", "fig2", "fig3", "im", "cb"}


class Program:
    """A program, before it is run.

    Args:
        path: of its source.
        solved: names that calls of solvers are assigned to.
        within: the name of the function whose body is the program; None for the module's.

    Attributes:
        namespace: names of the program, after `prepare`.
    """

    def __init__(self, path: Path, solved: Sequence[str], within: str | None = None) -> None:
        self.path, self._tree = path, ast.parse(path.read_text())
        body, setup = self._tree.body, []
        if within is not None:
            (function,) = [one for one in body if getattr(one, "name", None) == within]
            assert isinstance(function, ast.FunctionDef)
            setup = [one for one in body if one is not function and not isinstance(one, ast.If)]
            body = _defaults(function) + function.body
        self._setup, self._solvers = _apart([*setup, *body], set(solved))
        self.namespace: dict[str, Any] = {"__name__": path.stem, "__file__": str(path)}

    def prepare(self, **given: Any) -> None:
        """Run the setup.

        Args:
            given: values of names, which their assignments in the program do not change.
        """
        self.namespace |= given
        kept = [one for one in self._setup if not (_targets(one) and _targets(one) <= given.keys())]
        exec(_compiled(kept, self.path), self.namespace)

    def solve(self, name: str, **keywords: Any) -> Any:
        """Call the solver of a name, with other values of keywords that the program gives.

        Returns:
            What the program assigns to the name.
        """
        statement = copy.deepcopy(self._solvers[name])
        (call,) = [one for one in ast.walk(statement) if _solver(one)]
        for keyword in call.keywords:
            if keyword.arg in keywords:
                keyword.value = ast.copy_location(
                    ast.Constant(keywords[keyword.arg]), keyword.value
                )
        exec(_compiled([statement], self.path), self.namespace)
        return self.namespace[name]

    def lines(self) -> int:
        """Lines of code, each statement formatted alike: without comments, docstrings, blank lines,
        and without the statements that draw pictures or print."""
        kept = [one for one in self._tree.body if not (_draws(one) or _is_text(one))]
        module = ast.Module(list(map(_without_text, kept)), [])
        return sum(1 for line in formatted(ast.unparse(module)).splitlines() if line.strip())


def formatted(source: str) -> str:
    """The source as ruff formats it, in lines of at most 100 characters."""
    command = [sys.executable, "-m", "ruff", "format", "--isolated", "--line-length", "100", "-"]
    return subprocess.run(command, input=source, text=True, capture_output=True, check=True).stdout


def _solver(node: ast.AST) -> bool:
    """True for a call that has a number of iterations."""
    named = isinstance(node, ast.Call) and {keyword.arg for keyword in node.keywords}
    return bool(named and named & {"niter", "maxiter"} and named & {"x0", "tau", "tol", "rtol"})


def _apart(
    statements: Sequence[ast.stmt], solved: set[str]
) -> tuple[list[ast.stmt], dict[str, ast.stmt]]:
    """The setup, and the calls of solvers by the name that they assign to."""
    setup: list[ast.stmt] = []
    solvers: dict[str, ast.stmt] = {}
    late = set(solved)
    for one in statements:
        if found := _targets(one) & solved:
            solvers[found.pop()] = one
        elif _draws(one) or isinstance(one, ast.Return) or late & _loads(one):
            late |= _targets(one)
        else:
            setup.append(one)
    return setup, solvers


def _defaults(function: ast.FunctionDef) -> list[ast.stmt]:
    """Assignments of the default values of arguments."""
    names = function.args.args[len(function.args.args) - len(function.args.defaults) :]
    pairs = zip(names, function.args.defaults, strict=True)
    return ast.parse("\n".join(f"{one.arg} = {ast.unparse(value)}" for one, value in pairs)).body


def _names(node: ast.AST, context: type[ast.expr_context]) -> Iterator[str]:
    for one in ast.walk(node):
        if isinstance(one, ast.Name) and isinstance(one.ctx, context):
            yield one.id


def _targets(statement: ast.stmt) -> set[str]:
    return set(_names(statement, ast.Store)) if isinstance(statement, ast.Assign) else set()


def _loads(statement: ast.stmt) -> set[str]:
    return set(_names(statement, ast.Load))


def _draws(statement: ast.stmt) -> bool:
    """True for a statement that draws, or imports what draws, or is of rank 0 alone."""
    imported = {a.name for a in getattr(statement, "names", ()) if isinstance(a, ast.alias)}
    if isinstance(statement, ast.If) and ast.unparse(statement.test) == "rank == 0":
        return True
    if isinstance(statement, ast.FunctionDef | ast.For):
        return False
    return bool(PICTURES & (_loads(statement) | _targets(statement) | imported)) or (
        "pyplot" in imported
    )


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _without_text(statement: ast.stmt) -> ast.stmt:
    if isinstance(statement, ast.FunctionDef) and _is_text(statement.body[0]):
        statement = copy.deepcopy(statement)
        statement.body = statement.body[1:]
    return statement


def _compiled(statements: Sequence[ast.stmt], path: Path) -> Any:
    return compile(ast.Module(list(statements), []), str(path), "exec")
