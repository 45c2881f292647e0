"""Saving and resuming of runs: when, what, and how the workers agree about it.

Files are the affair of `linop.solvers.checkpoint`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any, Protocol, TypedDict
from zlib import crc32

import numpy as np

from linop.errors import ArgumentError
from linop.solvers import checkpoint
from linop.solvers.arguments import whole
from linop.solvers.result import STOPPED
from linop.spaces.space import Space
from linop.spaces.vector import Vector, inners


class Checkpoints(TypedDict, total=False):
    """Keyword arguments for runs that may be interrupted.

    Attributes:
        checkpoint: path of a file to which the state is saved; each of several workers saves its
            own, with ``.1-of-4`` behind the path, and the file before it as ``….previous``.
        every: iterations between two checkpoints, 10 by default; the last one is saved too.
        resume: path of a checkpoint to go on from, bit for bit as if there had been no stop. All
            workers resume from the same iteration, or all raise.

    Example:
        A run that ends at its limit of iterations, and goes on from its file:

        >>> import tempfile
        >>> A, b = linop.local_operators.matrix(np.diag([1.0, 2.0, 4.0])), np.ones(3)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     first = linop.solvers.cg(A, b, maxiter=1, checkpoint=folder + "/state")
        ...     found = linop.solvers.cg(A, b, resume=folder + "/state")
        >>> first.success, found.success, found.nit
        (False, True, 3)
    """

    checkpoint: str | os.PathLike[str] | None
    every: int
    resume: str | os.PathLike[str] | None


class Saved(Protocol):
    """A method whose state is its public attributes."""

    status: int | None
    doubted: bool

    def state(self) -> dict[str, Any]:
        """The attributes to save, by name."""


class Saving:
    """Checkpoints of a run.

    Args:
        name: of the method, for errors.
        A: operator or plan; vectors are of its spaces, and of those of `likes`.
        methods: one for each right-hand side.
        problem: arguments that a resumed run must share.
        likes: vectors that define the problem, at least one.
        given: the keyword arguments.

    Raises:
        ArgumentError: an argument is not what it should be.
    """

    def __init__(
        self,
        name: str,
        A: Any,
        methods: Sequence[Saved],
        problem: Sequence[Any],
        likes: Sequence[Vector],
        given: Checkpoints,
    ) -> None:
        self._name, self._methods = name, methods
        self._problem, self._likes = problem, likes
        self._backend = getattr(A, "backend", None)
        self._every = whole(name, "every", given.get("every", 10), 1)
        self._resume = given.get("resume")
        self._files = {
            key: checkpoint.place(path, self._backend)
            for key, path in (("checkpoint", given.get("checkpoint")), ("resume", self._resume))
            if path is not None
        }
        sides = (getattr(A, "domain", None), getattr(A, "codomain", None))
        spaces = [*(one for one in sides if isinstance(one, Space)), *(v.space for v in likes)]
        self._spaces = {space.digest.hex(): space for space in spaces} if self._files else {}
        self._operator = _seen(A, likes[0]) if self._files else ""

    @property
    def resumes(self) -> bool:
        """True if the state is to be read."""
        return "resume" in self._files

    def save(self, iteration: int, maxiter: int) -> None:
        """Save the state if it is time to. Collective where it is.

        Raises:
            OSError: a worker cannot write its file; on every worker.
        """
        file = self._files.get("checkpoint")
        ended = all(one.status is not None and not one.doubted for one in self._methods)
        over = iteration == maxiter or ended
        if file is None or (iteration % self._every and not over):
            return
        failure: OSError | None = None
        try:
            state = [method.state() for method in self._methods]
            checkpoint.save(file, self._described(), iteration, state)
        except OSError as error:
            failure = error
        if self._total(int(failure is not None))[0]:
            raise failure or OSError(
                f"{self._name}: another worker cannot write its part of checkpoint={file.name!r}"
            )

    def load(self) -> int:
        """Set the state of the methods from the last checkpoint that all workers have. Collective.

        Returns:
            Its iteration.

        Raises:
            ArgumentError: there is none; on every worker.
        """
        last, problem = self._files["resume"], self._described()
        files = (last, checkpoint.previous(last))
        kept = [(checkpoint.iteration_of(file, problem), file) for file in files]
        kept = sorted(one for one in kept if one[0] >= 0)
        self._all_have(bool(kept), bool(checkpoint.problem_of(last)))
        iteration, file = kept[-1]
        workers, total = self._total(1, iteration)
        if iteration * workers > total:  # some have the one before it only
            iteration, file = kept[0]
        workers, total, squares = self._total(1, iteration, iteration**2)
        if squares * workers != total**2:
            raise ArgumentError(
                f"{self._name}: resume={str(self._resume)!r}: the workers have checkpoints of "
                f"different iterations, worker {getattr(self._backend, 'worker', 0)} of {iteration}"
            )
        for method, state in zip(self._methods, checkpoint.load(file, self._vector), strict=True):
            vars(method).update(state)
            method.status = None if method.status == STOPPED else method.status
        return iteration

    def _all_have(self, mine: bool, foreign: bool) -> None:
        """Check that all workers have a checkpoint.

        Args:
            foreign: there is one, which may be of another problem.

        Raises:
            ArgumentError: some have none; on every worker.
        """
        workers, none, other = self._total(1, int(not mine), int(foreign and not mine))
        if none:
            raise ArgumentError(
                f"{self._name}: resume={str(self._resume)!r}: {none} of {workers} workers have no "
                f"checkpoint of this problem there: {none - other} find none or a damaged one, "
                f"{other} one of another method, space, right-hand side or argument, or of another "
                f"number of workers"
            )

    def _vector(self, digest: str, arrays: dict[str, Any]) -> Vector:
        """A vector of this worker from the arrays of a file."""
        space, shared = self._spaces[digest], self._likes[0].shared
        of = getattr(getattr(self._backend, "arrays", None), "of", None)
        made = {}
        for name, array in arrays.items():
            array = array.view(space.dtype) if array.dtype.kind == "V" else array
            made[name] = array if of is None else of(space[name].memory).put(array)
        return Vector(space, made, None if shared is None else shared.derived("resume"))

    def _described(self) -> str:
        """The problem, for this worker's file: all that a run depends on."""
        likes = [[v.space.digest.hex()[:16], _code(v)] for v in self._likes]
        workers = getattr(self._backend, "workers", None)
        same = [likes, self._operator, list(self._problem)]
        given = [self._name, len(self._methods), workers, *same]
        return json.dumps(given, default=repr)

    def _total(self, *numbers: int) -> list[Any]:
        """Sums of a worker's numbers over all workers; collective."""
        like = self._likes[0]
        return inners([(like, like)], f"checkpoint of {self._name}", own=numbers)[1:]


def _seen(A: Any, like: Vector) -> str:
    """A check sum of this worker's part of the image of a vector under an operator, or under its
    adjoint: another operator has another one. Empty if the vector is in neither of its spaces.
    Collective for plans."""
    for side, apply in (("domain", A), ("codomain", getattr(A, "H", None))):
        if isinstance(space := getattr(A, side, None), Space) and callable(apply):
            if space == like.space:
                return _code(apply(like))
    return ""


def _code(vector: Vector) -> str:
    """A check sum of this worker's part of a vector."""
    code = 0
    for array in vector.arrays.values():
        host = checkpoint.on_host(array)
        code = crc32(np.ascontiguousarray(host).reshape(-1).view(np.uint8).data, code)
    return f"{code:08x}"
