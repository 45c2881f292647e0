"""The work of ``linop verify``: imports operators by name, and runs every check on each of them.

Nothing is printed here: `linop.tools.cli` parses options, `linop.tools.reporting` prints tables.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from linop import backends
from linop.backends.engine.base import Backend
from linop.backends.together.messages import decoded, encoded
from linop.errors import ArgumentError, UndecidableError
from linop.operators.operator import LinearOperator
from linop.testing.checks import check_adjoint, check_dot_exact, check_exact, check_linear
from linop.testing.code import code
from linop.testing.report import Report
from linop.testing.tested_maps.foreign import checkable
from linop.testing.tested_maps.pairs import Pair
from linop.testing.workers.rank import is_strategy

Check = Callable[[Any, Backend | str, int, int], Report]
"""Called with an operator, a backend, a seed and a number of trials."""
Finding = Callable[[Any, int], Report]
"""Called with an operator and a number of trials; backend and seed are bound."""

PROPERTIES: dict[str, Check] = {
    "dot product": lambda op, on, seed, n: check_adjoint(op, on, seed=seed, trials=n),
    "dot product of whole numbers": lambda op, on, seed, n: check_dot_exact(
        op, on, seed=seed, trials=n
    ),
    "linearity": lambda op, on, seed, n: check_linear(op, on, seed=seed, trials=n),
    "matrix": lambda op, on, seed, n: check_exact(op, backend=on),
}
"""The checks by name; ``matrix`` builds dense matrices, and is for small operators."""

MATRIX = 600
"""Largest number of rows or columns of which the matrix is checked."""


@dataclass(frozen=True)
class Case:
    """A subject of verification: an operator (linop's, SciPy's, PyLops', a `Pair`), or a Hypothesis
    strategy of operators."""

    name: str
    what: Any

    @property
    def drawn(self) -> bool:
        return is_strategy(self.what)

    @property
    def size(self) -> str:
        return "×".join(map(str, getattr(self.what, "shape", ())))

    def properties(self, matrix: bool) -> list[str]:
        """The names of the checks that apply; the matrix only if requested and small enough."""
        small = self.drawn or max(getattr(self.what, "shape", (0,))) <= MATRIX
        return [name for name in PROPERTIES if name != "matrix" or (matrix and small)]


@dataclass(frozen=True)
class Result:
    """The result of one check of one case.

    Attributes:
        case, backend: names.
        checked: the name of the check, a key of `PROPERTIES`.
        size: rows × columns; empty if unknown.
        seconds: duration of the check.
        report: None if the check did not complete.
        error: the exception raised instead, as text.
        skipped: the reason why the check could not be decided.
    """

    case: str
    backend: str
    checked: str
    size: str
    seconds: float
    report: Report | None = None
    error: str = ""
    skipped: str = ""

    @property
    def failed(self) -> bool:
        return bool(self.error) or (self.report is not None and not self.report)

    def as_dict(self) -> dict[str, Any]:
        """The result as data for JSON."""
        report = self.report.as_dict() if self.report is not None else None
        seconds = round(self.seconds, 6)
        return {**vars(self), "failed": self.failed, "seconds": seconds, "report": report}


# Targets


def cases(target: str, workers: int) -> list[Case]:
    """Import the operators that a target names.

    Args:
        target: ``module:name`` of an operator (linop's, SciPy's, PyLops', a `pair`), of a function
            that returns one (called with the number of workers, if it has a parameter ``workers``),
            or of a Hypothesis strategy of operators; or ``module``, for all public operators in it,
            and its functions annotated to return a `LinearOperator` or a `Pair`.
        workers: the number of workers.

    Raises:
        ArgumentError: the target cannot be imported, or is no operator.
    """
    module_name, _, attribute = target.partition(":")
    sys.path.insert(0, "")
    try:
        found: Any = importlib.import_module(module_name)
        for part in filter(None, attribute.split(".")):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ArgumentError(f"{target!r}: {error}") from None
    finally:
        with suppress(ValueError):
            sys.path.remove("")
    if attribute:
        return [Case(target, _made(target, found, workers))]
    return _of_module(module_name, found, workers)


def _of_module(name: str, module: Any, workers: int) -> list[Case]:
    public = {key: value for key, value in vars(module).items() if not key.startswith("_")}
    own = {k: v for k, v in public.items() if hasattr(v, "H") and checkable(v)}
    own |= {k: v for k, v in public.items() if _is_factory(v) and v.__module__ == name}
    if not own:
        raise ArgumentError(
            f"{name!r}: no operators in this module, nor functions that are annotated to return a "
            f"LinearOperator or a Pair; name what is to be verified, as in {name}:operator"
        )
    return [Case(f"{name}:{k}", _made(f"{name}:{k}", v, workers)) for k, v in own.items()]


def _is_factory(found: Any) -> bool:
    returns = getattr(found, "__annotations__", {}).get("return", "")
    names = (LinearOperator.__name__, Pair.__name__)
    return inspect.isfunction(found) and str(getattr(returns, "__name__", returns)).endswith(names)


def _made(target: str, found: Any, workers: int) -> Any:
    """An imported object, or the result of calling it, as an operator or a strategy.

    Raises:
        ArgumentError: it is neither, or cannot be called.
    """
    if not checkable(found) and not is_strategy(found) and callable(found):
        wants_workers = "workers" in inspect.signature(found).parameters
        try:
            found = found(workers=workers) if wants_workers else found()
        except TypeError as error:
            raise ArgumentError(
                f"{target!r}: {error}; a function is called with nothing, or with workers"
            ) from None
    if not checkable(found) and not is_strategy(found):
        raise ArgumentError(f"{target!r} is {type(found).__name__}, not an operator")
    return found


# Checking


def verified(case: Case, backend: Backend | str, name: str, seed: int, examples: int) -> Result:
    """Run one check of a case in this process.

    Args:
        case: an operator; or a strategy, from which operators are drawn, and the report is of the
            simplest one that fails.
        backend: a backend or its name. The call is collective on a backend of one worker.
        name: of the check, a key of `PROPERTIES`.
        seed: of the random vectors, or of the drawn operators.
        examples: the number of trials, or of drawn operators.

    Raises:
        ArgumentError: a strategy on a backend of one worker, since ranks cannot draw alike.
    """
    if case.drawn and not isinstance(backend, str):
        raise ArgumentError(f"{case.name}: ranks cannot draw operators alike; run it without them")
    on = backend if isinstance(backend, str) else backend.name
    find: Finding = lambda op, n: PROPERTIES[name](op, backend, seed, n)  # noqa: E731
    return _found(case, on, name, find, seed, examples)


def verified_by_ranks(
    case: Case, target: str | None, on: str, workers: int, name: str, seed: int, examples: int
) -> Result:
    """Run one check of a case on the ranks of an MPI job, which is started on first use, and shared
    by later calls.

    Args:
        case, name, seed, examples: as for `verified`.
        target: from which the ranks import an operator that is not linop's.
        on: the name of the backend, one of `linop.backends.RANKS`.
        workers: the number of ranks.
    """
    from linop.testing.workers.jobs import job

    def find(op: Any, n: int) -> Report:
        if case.drawn and not isinstance(op, LinearOperator):
            raise ArgumentError(
                f"{case.name}: of what is drawn, only linop's operators reach ranks"
            )
        what = op if isinstance(op, LinearOperator) else (target, case.name)
        with TemporaryDirectory(prefix="linop-") as folder:
            path = Path(folder) / "report"
            job(workers).run(check_on_rank, what, on, name, seed, n, path)
            report: Report | UndecidableError = decoded(path.read_bytes())
        if isinstance(report, UndecidableError):
            raise report
        return report

    return _found(case, on, name, find, seed, examples)


def check_on_rank(
    comm: Any, what: Any, on: str, name: str, seed: int, examples: int, path: Path
) -> None:
    """Run a check on this rank; collective. Rank 0 writes the report, or the `UndecidableError`,
    to a file.

    Args:
        what: an operator of linop's, or a pair (target, name of the case).
    """
    if not isinstance(what, LinearOperator):
        target, wanted = what
        (what,) = [case.what for case in cases(target, comm.size) if case.name == wanted]
    report: Report | UndecidableError
    try:
        report = PROPERTIES[name](what, backends.get(on, comm=comm), seed, examples)
    except UndecidableError as error:  # on every rank
        report = error
    if comm.rank == 0:
        path.write_bytes(encoded(report))


def _found(case: Case, backend: str, name: str, find: Finding, seed: int, examples: int) -> Result:
    """Run a check, and catch what it raises, so that the other cases are checked, too."""
    start = time.perf_counter()
    found: dict[str, Any] = {}
    try:
        found["report"] = (
            _drawn(case, find, seed, examples) if case.drawn else find(case.what, examples)
        )
    except UndecidableError as error:
        found["skipped"] = str(error)
    except Exception as error:
        notes = "\n".join(["", *getattr(error, "__notes__", [])])
        found["error"] = f"{type(error).__name__}: {error}{notes}"
    return Result(case.name, backend, name, case.size, time.perf_counter() - start, **found)


def _drawn(case: Case, find: Finding, seed: int, examples: int) -> Report:
    """The report of the simplest failing operator that a strategy draws; if none fails, of the last
    one.

    Raises:
        UndecidableError: the check can decide none of them.
    """
    import hypothesis

    last: list[Report] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=[phase for phase in hypothesis.Phase if phase is not hypothesis.Phase.explain],
        suppress_health_check=list(hypothesis.HealthCheck),
        verbosity=hypothesis.Verbosity.quiet,
    )
    @hypothesis.given(case.what)
    def holds(op: Any) -> None:
        try:
            report = find(op, 1)
        except UndecidableError:
            hypothesis.reject()
        last[:] = [replace(report, operator=code(op))]
        assert report

    try:
        holds()
    except AssertionError:
        if not last or last[0]:
            raise  # not the assertion above
    except hypothesis.errors.Unsatisfiable:
        raise UndecidableError(f"{case.name}: nothing that it draws can be decided") from None
    return last[0]
