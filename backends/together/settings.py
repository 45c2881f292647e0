"""Settings: arguments of `linop.backends.get` and `linop.launch`, each with an environment
variable; validation of their values, and comparison across ranks.

No other module reads a variable LINOP_*. docs/settings.md has `SETTINGS` as a table.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from linop.errors import ArgumentError, BackendError
from linop.planning.patterns import spans


class Found(NamedTuple):
    """Value of a setting on this worker."""

    value: Any
    """The value; the default if the given one is invalid."""
    words: str
    """Text: the value and its origin."""
    wrong: str = ""
    """Text of an error; empty if the value is valid."""

    def checked(self) -> Any:
        """The value.

        Raises:
            ArgumentError: the given value is invalid.
        """
        if self.wrong:
            raise ArgumentError(self.wrong)
        return self.value


class Setting(NamedTuple):
    """An argument, and the environment variable used if it is not given."""

    option: str
    """Name of the argument; empty if there is the variable alone."""
    variable: str
    expected: str
    """Valid values, as text."""
    default: Any
    default_words: str
    read: Callable[[Any], Any]
    """Converts an argument, or a variable's text, to a value. Raises ValueError or TypeError if it
    is invalid."""
    about: str

    @property
    def name(self) -> str:
        """The argument; of a setting without one, the variable."""
        return self.option or self.variable

    def text(self) -> str | None:
        """The variable's text; None if it is unset or empty."""
        return os.environ.get(self.variable) or None

    def found(self, given: object = None, default: object = None) -> Found:
        """Value of the argument; of the variable if that is None; else the default.

        Args:
            default: replaces the setting's own default.
        """
        default = self.default if default is None else default
        text = self.text()
        if given is None and text is None:
            return Found(default, f"{self.name}={default!r} by default")
        name, said = (self.variable, text) if given is None else (self.name, given)
        words = f"{name}={said if given is None else repr(said)}"
        try:
            return Found(self.read(said), words)
        except (ValueError, TypeError):
            return Found(default, words, f"{name}: expected {self.expected}, given {said!r}")


def _flag(given: Any) -> bool:
    if given in ("0", False):
        return False
    if given in ("1", True):
        return True
    raise ValueError(given)


def _seconds(given: Any) -> float:
    if not float(given) > 0:
        raise ValueError(given)
    return float(given)


def _whole(given: Any) -> int:
    if int(given) < 1:
        raise ValueError(given)
    return int(given)


def _one_of(*names: str) -> Callable[[Any], str]:
    def read(given: Any) -> str:
        if given not in names:
            raise ValueError(given)
        return str(given)

    return read


WINDOWS = Setting(
    "windows",
    "LINOP_WINDOWS",
    "0 or 1",
    True,
    "1",
    _flag,
    "ranks of one machine exchange through shared memory, where it can be had",
)
WAIT_LIMIT = Setting(
    "wait_limit",
    "LINOP_WAIT_LIMIT",
    "a number of seconds above 0 (inf for no limit)",
    600,
    "600; on threads inf",
    _seconds,
    "a wait that takes longer becomes a `DeadlockError` on every worker",
)
DEBUG = Setting(
    "debug",
    "LINOP_DEBUG",
    "0 or 1",
    False,
    "0",
    _flag,
    "compare at every call what workers call, and with what; prove plans when they are compiled",
)
COLLECTIVES = Setting(
    "collectives",
    "LINOP_COLLECTIVES",
    "0 or 1",
    None,
    "where predicted to be faster",
    _flag,
    "ranks that share no memory run collectives by MPI's",
)
SUMS = Setting(
    "sums",
    "LINOP_SUMS",
    "fixed, any, exact or tree",
    "fixed",
    "fixed",
    _one_of("fixed", "any", "exact", "tree"),
    "sums are formed by worker; in any order by MPI, which may change last bits; rounded once; or "
    "in a binary tree over the workers",
)


def kept_sums(given: str) -> str:
    """`Backend.sums` of the setting, of which "any" concerns collectives of MPI alone."""
    return "fixed" if given == "any" else given


def check_kept_sums(given: str | None, kept: str, whose: str) -> None:
    """Check sums that are asked for of a backend that exists: it keeps those of the first call.

    Args:
        given: None if none are asked for.
        kept: those of the backend.
        whose: names what the backend belongs to.

    Raises:
        ArgumentError: there are no such sums. BackendError: the backend has others.
    """
    if given is not None and SUMS.found(given).checked() != kept:
        raise BackendError(
            f"sums={given!r} wanted; this {whose}'s backend has {kept!r}, those of its first call. "
            f"Give them to that call, or to linop.launch(main, sums={given!r})"
        )


GPU_WAY = Setting(
    "way",
    "LINOP_GPU_WAY",
    "auto, aware, staged or nccl",
    "auto",
    "auto",
    _one_of("auto", "aware", "staged", "nccl"),
    "MPI is given the memory of a GPU, or messages are staged through main memory, or NCCL's",
)
SPMD_WORKERS = Setting(
    "--linop-workers",
    "LINOP_SPMD_WORKERS",
    "a whole number from 1",
    None,
    "no limit",
    _whole,
    "run no test of `@linop.testing.spmd` on more workers",
)
SPMD_BACKEND = Setting(
    "--linop-backend",
    "LINOP_SPMD_BACKEND",
    "mpi or threads",
    None,
    "as the test says",
    _one_of("mpi", "threads"),
    "run all of these tests on that backend",
)
SPMD_TIMEOUT = Setting(
    "--linop-timeout",
    "LINOP_SPMD_TIMEOUT",
    "a number of seconds above 0",
    None,
    "as the test says",
    _seconds,
    "seconds that an example of these tests may take",
)
LOAD_BYTES = Setting(
    "",
    "LINOP_LOAD_BYTES",
    "a whole number from 1",
    None,
    "64 times the bytes of the model's tensors, and 64 MiB",
    _whole,
    "bytes that a load reads from a checkpoint, or unpacks, at most",
)
LOAD_DEPTH = Setting(
    "",
    "LINOP_LOAD_DEPTH",
    "a whole number from 1",
    100,
    "100",
    _whole,
    "levels of the objects in a checkpoint, within each other, at most",
)
LOAD_TIME = Setting(
    "",
    "LINOP_LOAD_TIME",
    "a number of seconds above 0 (inf for no limit)",
    600,
    "600",
    _seconds,
    "seconds that a load may take to look through a checkpoint",
)
SETTINGS = (
    WINDOWS,
    WAIT_LIMIT,
    DEBUG,
    COLLECTIVES,
    SUMS,
    GPU_WAY,
    SPMD_WORKERS,
    SPMD_BACKEND,
    SPMD_TIMEOUT,
    LOAD_BYTES,
    LOAD_DEPTH,
    LOAD_TIME,
)
"""All settings, in the order of the table."""


def table() -> list[str]:
    """The settings as lines of a Markdown table."""
    rows = [("variable", "argument", "values", "default", "meaning"), ("---",) * 5]
    for one in SETTINGS:
        code = f"`{one.variable}`", f"`{one.option}`" if one.option else "none"
        rows.append((*code, one.expected, one.default_words, one.about))
    return [f"| {' | '.join(row)} |" for row in rows]


Founds = Mapping[str, Found]
"""Settings of a worker, by option; "backend" is the backend's name."""


def found(backend: str, **given: object) -> Founds:
    """Settings of a backend on this worker.

    Args:
        given: arguments by option; None for those not given.
    """
    own = {one.option: one.found(given[one.option]) for one in SETTINGS if one.option in given}
    return {"backend": Found(backend, f"backend={backend!r}"), **own}


def alike(everyone: Sequence[Founds]) -> dict[str, Any]:
    """Values common to all workers, by option.

    Args:
        everyone: settings of each worker, by worker; the same on all workers.

    Raises:
        ArgumentError: a value is invalid on some worker. BackendError: values differ between
            workers. Either on every worker, with the same text.
    """
    wrong = [[one.wrong for one in founds.values() if one.wrong] for founds in everyone]
    for worker, texts in enumerate(wrong):
        if texts:
            raise ArgumentError(texts[0] if all(wrong) else f"worker {worker}: {texts[0]}")
    differ = []
    for option in everyone[0]:
        # Options differ between backends.
        found = [one[option] for one in everyone if option in one]
        if len({one.value for one in found}) > 1:
            differ.append(_difference([one.words for one in found]))
    if differ:
        raise BackendError(
            f"workers have different settings: {'; '.join(differ)}. Give all workers the same, as "
            f"arguments or as variables of every rank's environment: to other machines Open MPI's "
            f"mpiexec passes on those that are named (-x NAME), MPICH's all unless told (-genvlist)"
        )
    return {option: found.value for option, found in everyone[0].items()}


def _difference(words: Sequence[str]) -> str:
    """Text: the distinct values, each with its workers."""
    by_words: dict[str, list[int]] = {}
    for worker, one in enumerate(words):
        by_words.setdefault(one, []).append(worker)
    return " and ".join(
        f"{one} on worker{'s' if len(workers) > 1 else ''} {spans(tuple(workers))}"
        for one, workers in by_words.items()
    )
