"""Every error linop raises on purpose: one small family, each also the fitting built-in.

Catch :class:`LinopError` for all of them, or the built-in you would have caught anyway. A message
states what was given, what was expected, and how to mend it.
"""

from __future__ import annotations

from contextlib import ContextDecorator
from typing import TypeVar

T = TypeVar("T")
_INTERRUPTED = "linop_interrupted"
"""Attribute of exceptions, of any class."""


class LinopError(Exception):
    """Base of every error that linop raises on purpose.

    Attributes:
        alarm: the plan's tag, where this worker has the error by another one's alarm; else None.
        layer: the name, in its network, of the layer that raised it; empty if none did.
    """

    alarm: int | None = None
    layer: str = ""

    # KeyError would print the repr of its message; every error of this family prints the text.
    __str__ = Exception.__str__


class SpaceError(LinopError, ValueError):
    """Two spaces that should be the same are not, or a space cannot be built as asked."""


class RegionError(SpaceError, KeyError):
    """A region is unknown to a space, or named twice in it."""


class SubsetError(LinopError, IndexError, ValueError):
    """An index into a region that is out of bounds, has a step, or does not fit its dimensions."""


class ShapeError(LinopError, ValueError):
    """Shapes that should be equal are not."""


class DTypeError(LinopError, TypeError):
    """An array or a scalar of a type that the space cannot hold."""


class ArgumentError(LinopError, TypeError):
    """An argument of the wrong kind (not: of the wrong value)."""


class PartitionError(LinopError, ValueError):
    """A partition that does not fit the tensor, the operator, or another partition."""


class UndecidableError(LinopError, RuntimeError):
    """A question about an operator that cannot be answered exactly from what is known of it."""


class PlanError(LinopError, RuntimeError):
    """The plans of all workers do not fit together, or are not their operator. See
    :mod:`linop.planning.verification.plan_errors` for its kinds."""


class BackendError(LinopError, RuntimeError):
    """A backend cannot run an operator here: a worker is missing, or workers disagree."""


class DeadlockError(BackendError):
    """Workers wait for messages that nobody is going to send."""


class MissingExtraError(LinopError, ImportError):
    """An optional package is not installed; the message names the extra that installs it."""


def expect(what: str, value: object, kind: type[T]) -> T:
    """The value, if it is of the kind wanted.

    Raises:
        ArgumentError: it is not; the message says what was given instead.
    """
    if not isinstance(value, kind):
        raise ArgumentError(f"{what}: expected a {kind.__name__}, given {value!r}")
    return value


def interrupt(error: BaseException) -> None:
    """State that an exception ended communication halfway: messages of this worker may be left, or
    others may wait for it. Said where it passes through, be it linop's own or a user's."""
    vars(error)[_INTERRUPTED] = True  # for those too whose class allows no assignment


def has_interrupted(error: BaseException) -> bool:
    """True if an exception, or one that it was raised because of, ended communication halfway."""
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


class communication(ContextDecorator):  # it reads as a function
    """An exception that leaves the block, or the function that this decorates, is one that
    interrupts."""

    def __enter__(self) -> None:
        """Nothing is needed."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            interrupt(error)
