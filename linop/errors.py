"""Exception classes of linop, and the mark of exceptions that interrupted communication.

All classes derive from :class:`LinopError` and from the matching built-in exception, and can be
caught as either. A message states the given, the expected and a remedy; docs/errors.md has the
usual reasons of each class, and what to do: a note under each traceback says where to read it.
Errors of static verification are in :mod:`linop.planning.verification.plan_errors`.
"""

from __future__ import annotations

from contextlib import ContextDecorator
from functools import cache
from typing import TYPE_CHECKING, TypeVar

T = TypeVar("T")
_INTERRUPTED = "linop_interrupted"
"""Attribute set on exceptions, of any class, by `interrupt`."""


class LinopError(Exception):
    """Base class of all errors that linop raises.

    Example:
        >>> try:
        ...     linop.TensorSpace((4,), linop.Partition((2, 2)))  # a grid of more axes
        ... except linop.LinopError as error:
        ...     type(error).__name__, isinstance(error, ValueError)
        ('PartitionError', True)
    """

    alarm: int | None = None
    """The plan's tag if the error was raised on another worker and signalled to this one."""
    layer: str = ""
    """The name, in its network, of the layer that raised it; empty if none did."""

    # KeyError prints the repr of its message; these print the text.
    __str__ = Exception.__str__

    if not TYPE_CHECKING:  # a list, as of every exception

        @property
        def __notes__(self) -> list[str]:
            """Lines under the traceback (PEP 678). Of linop's own classes the first one says where
            the class is explained; it is made when somebody looks, as most errors are caught, and
            is no part of the text, which is compared, prefixed and sent."""
            notes = vars(self).get("__notes__")
            if notes is None:
                if not _is_own(type(self)):
                    raise AttributeError("__notes__")  # as of exceptions without notes
                named = next(kind for kind in type(self).__mro__ if "Error" in kind.__name__)
                notes = vars(self)["__notes__"] = [explained_at(named.__name__)]
            return notes

        @__notes__.setter
        def __notes__(self, notes: list[str]) -> None:
            vars(self)["__notes__"] = notes


class SpaceError(LinopError, ValueError):
    """Two spaces that should be equal differ, or a region or space cannot be built as given.

    Example:
        >>> spaces = (linop.Space(linop.Region(name, 2)) for name in "ab")
        >>> A, B = map(linop.identity, spaces)
        >>> A @ B
        Traceback (most recent call last):
        linop.errors.SpaceError: ...
    """


class RegionError(SpaceError, KeyError):
    """A region is unknown to a space, not held by this process, or named twice in a space.

    Example:
        >>> linop.Space(linop.Region("a", 2))["b"]
        Traceback (most recent call last):
        linop.errors.RegionError: ...
    """


class SubsetError(LinopError, IndexError, ValueError):
    """An index into a region is out of bounds, has a step, or does not fit its dimensions.

    Example:
        >>> linop.Region("a", 4)[2:6]
        Traceback (most recent call last):
        linop.errors.SubsetError: ...
    """


class ShapeError(LinopError, ValueError):
    """Shapes that should be equal differ.

    Example:
        >>> linop.TensorSpace((6,), linop.Partition(2)).scatter(np.ones(5))
        Traceback (most recent call last):
        linop.errors.ShapeError: scatter: global array of shape (5,) given, (6,) expected...
    """


class DTypeError(LinopError, TypeError):
    """An array or scalar has a dtype or value that the space cannot hold.

    Example:
        >>> linop.Space(linop.Region("a", 2), "int8").unflatten(np.array([300, 1]))
        Traceback (most recent call last):
        linop.errors.DTypeError: ...
    """


class ArgumentError(LinopError, TypeError):
    """An argument has the wrong type, or is none of the accepted kinds.

    Example:
        >>> linop.launch(print, workers=0)
        Traceback (most recent call last):
        linop.errors.ArgumentError: ...
    """


class AmbiguousError(LinopError, ValueError):
    """A truth value was asked of many elements, as of a comparison of vectors.

    Example:
        >>> v = linop.Space(linop.Region("a", 2)).unflatten(np.ones(2))
        >>> bool(v == v)
        Traceback (most recent call last):
        linop.errors.AmbiguousError: ...
    """


class PartitionError(LinopError, ValueError):
    """A partition does not fit the tensor, the operator, or another partition.

    Example:
        >>> linop.TensorSpace((4,), linop.Partition((2, 2)))  # a grid of more axes
        Traceback (most recent call last):
        linop.errors.PartitionError: ...
    """


class UndecidableError(LinopError, RuntimeError):
    """A property of an operator cannot be decided exactly, as equality with unknown matrices.

    Example:
        >>> r = linop.Region("r", 4)
        >>> F = linop.local(r, r, forward=lambda x: 2 * x, adjoint=lambda y: 2 * y)
        >>> F.equals(2 * linop.identity(F.domain))
        Traceback (most recent call last):
        linop.errors.UndecidableError: ...
    """


class PlanError(LinopError, RuntimeError):
    """The plans of all workers are inconsistent, or do not compute their operator. The subclasses
    are in :mod:`linop.planning.verification.plan_errors`.

    Example:
        >>> shift = linop.shift(linop.TensorSpace((4,), linop.Partition(2)), 1)
        >>> try:
        ...     linop.verify_plans([], shift)  # no worker has a plan
        ... except linop.errors.PlanError as error:
        ...     type(error).__name__
        'WorkerError'
    """


class BackendError(LinopError, RuntimeError):
    """A backend cannot run an operator: for example, a worker is missing, or workers disagree.

    Example:
        >>> shift = linop.shift(linop.TensorSpace((4,), linop.Partition(2)), 1)
        >>> linop.launch(lambda backend: shift.compile(backend), workers=1, backend="threads")
        Traceback (most recent call last):
        linop.errors.BackendError: ...
    """


class DeadlockError(BackendError):
    """Workers wait for messages that no worker is going to send.

    Example:
        >>> shift = linop.shift(linop.TensorSpace((4,), linop.Partition(2)), 1)
        >>> def skips(backend):
        ...     plan = shift.compile(backend)
        ...     if backend.worker:  # worker 0 does not call
        ...         plan(np.ones(2))
        >>> linop.launch(skips, workers=2, backend="threads")
        Traceback (most recent call last):
        linop.errors.DeadlockError: ... worker 0 has ended; worker 1 waits for ...
    """


class MissingExtraError(LinopError, ImportError):
    """An optional package is not installed; the message names the extra that provides it.

    Example:
        Where Hypothesis is not installed, ``import linop.testing.strategies`` raises::

            linop.errors.MissingExtraError: linop.testing.strategies needs Hypothesis: pip install
            'linop-algebra[testing]'
    """


@cache
def site() -> str:
    """Address of the documentation by the installed project's metadata; empty if these name none,
    or nothing is installed."""
    from importlib import metadata  # here, since few programs ask

    try:
        links = metadata.metadata("linop-algebra").get_all("Project-URL", [])
    except metadata.PackageNotFoundError:
        return ""
    addresses = dict(str(link).split(", ", 1) for link in links)
    return addresses.get("Documentation", "").rstrip("/")


@cache
def explained_at(name: str) -> str:
    """The note of a class of errors: its place on the site, and the command that prints it."""
    pages = f"{site()}/errors.html#{name.lower()} or " if site() else ""
    return f"Why this happens, and what to do: {pages}`linop explain {name}`"


def expect(what: str, value: object, kind: type[T]) -> T:
    """Check that a value is an instance of `kind`, and return it.

    Raises:
        ArgumentError: it is not; the message opens with `what` and shows the value.
    """
    if not isinstance(value, kind):
        raise ArgumentError(f"{what}: expected a {kind.__name__}, given {value!r}")
    return value


def _is_own(kind: type) -> bool:
    """True for linop's errors, which every process can import."""
    return issubclass(kind, LinopError) and kind.__module__.partition(".")[0] == "linop"


def restated(error: BaseException, text: str) -> LinopError:
    """An error with another text, which other workers can be sent: of the same class, or of the
    nearest base class above; a `BackendError` that names the class, if that is none of linop's."""
    kind = next((kind for kind in type(error).__mro__ if _is_own(kind)), None)
    return kind(text) if kind else BackendError(f"{type(error).__name__}: {text}")


def was_told(error: BaseException) -> bool:
    """True if the error is another worker's, which this one was told by an alarm."""
    return isinstance(error, LinopError) and error.alarm is not None


def name_layer(error: LinopError, where: str, kind: str = "") -> None:
    """Prefix an error's text with the layer in which it was raised, unless it has one.

    Args:
        where: name of the layer.
        kind: class of the layer; removed from the start of the text.
    """
    if where and not error.layer:
        text = str(error).removeprefix(f"{kind}: ")
        error.args = (f"{where}: {text}", *error.args[1:])
        error.layer = where


def interrupt(error: BaseException) -> None:
    """Mark an exception, linop's or a user's, as having interrupted communication: messages of this
    worker may be unconsumed, or other workers may wait for it."""
    vars(error)[_INTERRUPTED] = True  # works for classes that forbid assignment too


def has_interrupted(error: BaseException) -> bool:
    """True if an exception, or one in its causes, contexts or groups, is marked by `interrupt`."""
    found, left = [], [error]
    while left:
        one = left.pop()
        if _INTERRUPTED in vars(one):
            return True
        found.append(one)
        parts = one.exceptions if isinstance(one, BaseExceptionGroup) else ()
        causes = (one.__cause__, one.__context__, *parts)
        left += [cause for cause in causes if cause is not None and cause not in found]
    return False


class communication(ContextDecorator):  # lower case: used like a function
    """Context manager and decorator that marks any exception leaving its block by `interrupt`."""

    def __enter__(self) -> None:
        """No set-up."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            interrupt(error)
