"""The driver of iterative methods: reductions, callbacks, progress, checkpoints.

SciPy's own solvers cannot be used here: they hold flat arrays of one process, where these hold
vectors whose parts are on many workers and whose inner products are collective calls.

A method (`Method`) is written for one right-hand side, as generators that yield the inner products
they need (`Ask`) and get numbers back. `run` drives one method or several side by side, and joins
what they ask for in the same round into one collective call. Checks of arguments are in
`linop.solvers.arguments`, checkpoints in `linop.solvers.saving`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple, cast

import numpy as np

from linop.errors import ArgumentError, MissingExtraError
from linop.solvers import progress
from linop.solvers.arguments import function_or_none, whole
from linop.solvers.result import ACCURACY, CONVERGED, LIMIT, STOPPED, Result
from linop.solvers.saving import Checkpoints, Saving
from linop.spaces.finite import not_finite
from linop.spaces.scalars import Scalar
from linop.spaces.vector import Vector, inners

Callback = Callable[[Vector], object]
Named = tuple[str, Vector, Vector]
"""The name of a product's vectors, for errors, and the two."""


class Control(Checkpoints, total=False):
    """Keyword arguments that all iterative methods take, beside those of `Checkpoints`.

    Attributes:
        show: True prints a line an iteration, on the first worker; "bar" shows a progress bar
            there, of tqdm (``pip install 'linop-algebra[progress]'``).

    Example:
        A line for each iteration; `Checkpoints` has an example of runs that are saved:

        >>> A = linop.local_operators.matrix(np.diag([2.0, 4.0]))
        >>> found = linop.solvers.cg(A, np.array([2.0, 8.0]), show=True)
        cg     1  residual ...
        cg     2  residual ...
    """

    show: bool | str


class Ask(NamedTuple):
    """Inner products that a method needs.

    Attributes:
        pairs: names for errors, and the two vectors of each product.
        final: True if the method's `x` is now that of this iteration: the callback is called, and
            its vote travels with these products. A step without one votes with the next step's
            first products, and changes nothing before it.
        sources: vectors that the step computed, by name and in order: if a product is not finite,
            the first of them that is not is named.
    """

    pairs: Sequence[Named]
    final: bool = False
    sources: Sequence[tuple[str, Vector]] = ()


Steps = Generator[Ask, list[Any], None]


class Method:
    """One right-hand side of an iterative method. Public attributes are its state, which is saved;
    those with an underscore are given by the arguments.

    Attributes:
        x: the current solution.
        nit: iterations done.
        residuals: norms of the residual, in the method's units.
        status: see `linop.solvers.result`; None while it goes on.
        message: the reason of the end.
        doubted: True after a recurrence has converged, until `verify` has compared it with x.
        verified: the residual of x that `verify` found last; None before.
    """

    name = "solver"
    recurs = False
    """True if convergence is found by a recurrence, which rounding, or an operator that is not what
    the method assumes, drives from the residual of x. The driver then calls `verify`."""

    def __init__(self) -> None:
        self.nit = 0
        self.residuals: list[float] = []
        self.status: int | None = None
        self.message = ""
        self.doubted = False
        self.verified: float | None = None

    x: Vector

    def start(self) -> Steps:
        """Set the state before the first iteration; may end the method."""
        raise NotImplementedError

    def step(self) -> Steps:
        """One iteration, which counts itself in `nit`; may end the method."""
        raise NotImplementedError

    def verify(self) -> Steps:
        """Compute the residual of x, and call `confirmed`; go on from it if that returns False, and
        has not ended the method."""
        raise NotImplementedError

    def confirmed(self, met: bool, true: float, again: bool = True) -> bool:
        """`met`: that the criterion holds for x. If not, the method goes on; or it ends, if it
        cannot go on from x (not `again`), or did, and what has to be small has not fallen by half.

        Args:
            true: what has to be small, computed from x.
        """
        last, self.verified, self.doubted = self.verified, true, False
        if met:
            return True
        if not again or (last is not None and true > last / 2):
            self.ended_outside(
                ACCURACY,
                "attainable accuracy reached: the recurrence converged, and the residual computed "
                "from x did not",
            )
        else:
            self.status, self.message = None, ""
        return False

    def current(self) -> Vector | None:
        """The solution in the user's units, for the callback; None if this iteration has none."""
        return self.x

    def progress(self) -> dict[str, float]:
        """Numbers that lines and messages show, by name."""
        return {"residual": self.residuals[-1]}

    def result(self, reductions: Reductions) -> Result:
        """The result, after the end."""
        raise NotImplementedError

    def finished(
        self,
        values: tuple[Any, ...],
        x: Any,
        residuals: list[float],
        reductions: Reductions,
        **others: Any,
    ) -> Result:
        """The result that unpacks as `values`, in the user's units."""
        return Result(
            values,
            x=x,
            success=self.status == CONVERGED,
            status=self.status,
            message=self.message,
            nit=self.nit,
            residuals=residuals,
            reductions=reductions.count,
            **others,
        )

    def limits(self) -> str:
        """The limits asked for, for the message of a method that was ended from outside; may be
        empty."""
        return ""

    def end(self, status: int, message: str) -> None:
        """End the method for a reason."""
        self.status, self.message = status, f"{self.name}: {message}"
        self.doubted = self.recurs and status == CONVERGED

    def ended_outside(self, status: int, reason: str) -> None:
        """End the method by the driver; the message says how far it came."""
        numbers = ", ".join(f"{name} {value:.3g}" for name, value in self.progress().items())
        self.end(status, f"{reason}; {numbers}{self.limits()}")

    def state(self) -> dict[str, Any]:
        """The attributes that are saved."""
        return {name: value for name, value in vars(self).items() if name[0] != "_"}


class Reductions:
    """Inner products of a run, counted, and checked to be finite.

    Attributes:
        count: collective calls so far.
        real: True if the operator is linear over the real numbers alone, so that products are the
            real parts of the complex ones.
    """

    def __init__(self, method: str) -> None:
        self.method, self.count, self.real = method, 0, False

    def __call__(
        self,
        pairs: Sequence[Named],
        iteration: int = 0,
        own: Sequence[Scalar] = (),
        sources: Sequence[tuple[str, Vector]] = (),
    ) -> list[Any]:
        """The products of named pairs and the sums of own numbers, in one collective call. A
        vector's product with itself is real in complex spaces too.

        Raises:
            ArgumentError: a product is not finite, on every worker; it names the vector, the
                iteration, and the first element.
        """
        self.count += 1
        found: list[Any] = inners([pair[1:] for pair in pairs], f"step of {self.method}", own=own)
        for (name, *vectors), value in zip(pairs, found, strict=False):
            if not np.isfinite(value):
                every = [*sources, *((name, vector) for vector in vectors)]
                wheres = ((what, not_finite(vector)) for what, vector in every)
                beyond = name, "its square is beyond floating point: scale the operator"
                what, where = next((one for one in wheres if one[1]), beyond)
                raise ArgumentError(
                    f"{self.method}, iteration {iteration}: the {what} is not finite: {where}"
                )
        for k, (_, v, w) in enumerate(pairs):
            found[k] = found[k].real if v is w or self.real else found[k]
        return found

    def norms(self, named: Sequence[tuple[str, Vector]]) -> list[float]:
        """The norms of arguments: one collective call, and one more for each whose square is out of
        the range of floating point.

        Raises:
            ArgumentError: one is not finite, on every worker.
        """
        self.count += 1
        pairs = [(vector, vector) for _, vector in named]
        squares: list[Any] = [one.real for one in inners(pairs, f"step of {self.method}")]
        return [
            math.sqrt(square) if 2.0**-900 < square < 2.0**900 else self.norm(vector, f"the {name}")
            for (name, vector), square in zip(named, squares, strict=True)
        ]

    def norm(self, vector: Vector, what: str) -> float:
        """The norm of an argument, without overflow or underflow of its square.

        Raises:
            ArgumentError: it is not finite, on every worker.
        """
        self.count += 1
        norm = vector.norm()
        if not np.isfinite(norm):
            where = not_finite(vector) or "its norm is beyond floating point"
            raise ArgumentError(f"{self.method}: {what} is not finite: {where}")
        return norm


def run(
    A: Any,
    methods: Sequence[Method],
    maxiter: int,
    reductions: Reductions,
    callback: Callback | None = None,
    problem: Sequence[Any] = (),
    likes: Sequence[Vector] = (),
    /,
    **control: Any,
) -> list[Result]:
    """Drive methods side by side until each has ended; a result for each.

    Args:
        A: operator or plan; its backend says which worker this is.
        maxiter: iterations, at most.
        callback: called with a copy of each current x after each iteration, on the workers that
            give one. If it returns True, or raises StopIteration, on any worker, all end with this
            x; what else it returns is not looked at.
        problem: arguments that a resumed run must share: numbers, texts.
        likes: vectors that define the problem, as the right-hand sides: a checkpoint is of them and
            of vectors in their spaces and in A's.
        control: see `Control`; and ``maxiter``, where a method has another name for it.

    Raises:
        ArgumentError: an argument is not what it should be; or a vector is not finite; or there is
            no checkpoint to resume from; on every worker. OSError: one cannot be written.
    """
    if (said := control.pop("maxiter", None)) is not None:
        maxiter = whole(reductions.method, "maxiter", said)
    checked = _checked(reductions.method, control)
    return _Driver(A, methods, reductions, callback, problem, likes, checked).run(maxiter)


class _Driver:
    def __init__(
        self,
        A: Any,
        methods: Sequence[Method],
        reductions: Reductions,
        callback: Callback | None,
        problem: Sequence[Any],
        likes: Sequence[Vector],
        control: Control,
    ) -> None:
        self._methods, self._reductions = methods, reductions
        reductions.real = not getattr(getattr(A, "op", A), "clinear", True)
        name = reductions.method
        self._callback = function_or_none(name, "callback", callback)
        shown = _show(name, control)
        self._saving = Saving(name, A, methods, problem, likes, control)
        self._shown = progress.shown(shown, getattr(A, "backend", None), name)
        self._pending: dict[int, bool] = {}
        """Votes of callbacks that have not travelled yet, by the identity of the method."""
        self._done = 0

    def run(self, maxiter: int) -> list[Result]:
        if self._saving.resumes:
            self._done = self._saving.load()
        else:
            self._together([method.start() for method in self._methods], self._methods)
            for method in self._methods:
                method.doubted = False  # its residual is that of x
            if all(method.status == STOPPED for method in self._methods):
                self._saving.save(self._done, maxiter)
        with self._shown as show:
            while active := [m for m in self._methods if m.status is None or m.doubted]:
                going = [m for m in active if m.status is None]
                if going and self._done >= maxiter:
                    for method in going:
                        method.ended_outside(LIMIT, f"{maxiter} iterations done, the most allowed")
                    continue
                steps = [m.verify() if m.doubted else m.step() for m in active]
                advanced = self._together(steps, active)
                if going:
                    self._done += advanced
                    show(self._done, going)
                self._saving.save(self._done, maxiter)
        return [method.result(self._reductions) for method in self._methods]

    def _together(self, steps: Sequence[Steps], methods: Sequence[Method]) -> bool:
        """Advance generators to their ends; a collective call for the products of each round.

        Returns:
            False if all of them were dropped.
        """
        dropped = 0
        asked = {k for k, method in enumerate(methods) if method.doubted}
        stopped: set[int] = set()
        waiting = {k: ask for k, one in enumerate(steps) if (ask := next(one, None))}
        while waiting:
            answers = self._answers(waiting, methods, asked)
            for k, (vote, numbers) in answers.items():
                if vote:
                    stopped.add(k)
                if vote and not waiting[k].final:  # of the iteration before: this step is dropped
                    steps[k].close()
                    dropped += 1
                    del waiting[k]
                elif (ask := _sent(steps[k], numbers)) is None:
                    del waiting[k]
                else:
                    waiting[k] = ask
        for k, method in enumerate(methods):
            if k in stopped and method.status is None:
                method.ended_outside(STOPPED, "the callback asked to stop")
            elif k not in asked and method.status is None and method.nit:
                self._pending[id(method)] = self._stops(method)
        return dropped < len(steps)

    def _answers(
        self, waiting: dict[int, Ask], methods: Sequence[Method], asked: set[int]
    ) -> dict[int, tuple[bool, list[Any]]]:
        """The votes and products of a round, by the number of the method."""
        pairs = [pair for ask in waiting.values() for pair in ask.pairs]
        votes = []
        for k, ask in waiting.items():
            if ask.final:
                asked.add(k)
                votes.append(int(self._stops(methods[k])))
            else:
                votes.append(int(self._pending.pop(id(methods[k]), False)))
        sources = [source for ask in waiting.values() for source in ask.sources]
        found = iter(self._reductions(pairs, self._done + 1, votes, sources))
        numbers = {k: [next(found) for _ in ask.pairs] for k, ask in waiting.items()}
        return {k: (next(found) > 0, numbers[k]) for k in waiting}

    def _stops(self, method: Method) -> bool:
        """Call the user's function; True if it asks to stop."""
        if self._callback is None or (x := method.current()) is None:
            return False
        try:
            asked = self._callback(x.copy())
            return isinstance(asked, bool | np.bool_) and bool(asked)
        except StopIteration:
            return True


def _sent(steps: Steps, numbers: list[Any]) -> Ask | None:
    """The next request of a generator; None if it has ended."""
    try:
        return steps.send(numbers)
    except StopIteration:
        return None


def _checked(method: str, control: dict[str, Any]) -> Control:
    """The keyword arguments of `Control`.

    Raises:
        ArgumentError: an unknown one.
    """
    known = Control.__optional_keys__
    if unknown := [name for name in control if name not in known]:
        raise ArgumentError(
            f"{method}: unknown keyword argument {unknown[0]!r}; beside the method's own there are "
            f"{', '.join(sorted(known))}"
        )
    return cast(Control, control)


def _show(method: str, control: Control) -> bool | str:
    """The argument `show`.

    Raises:
        ArgumentError: it is none of the values allowed. MissingExtraError: a bar is wanted, and
            tqdm is not installed.
    """
    show = control.get("show", False)
    if not (isinstance(show, bool) or show == "bar"):
        raise ArgumentError(f"{method}: show is True, False or 'bar'; given {show!r}")
    if show == "bar" and find_spec("tqdm") is None:  # on all workers, though the first one shows it
        raise MissingExtraError(
            f"{method}: show='bar' needs tqdm: pip install 'linop-algebra[progress]'; show=True "
            f"prints lines"
        )
    return show
