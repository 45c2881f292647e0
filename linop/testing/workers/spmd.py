"""The decorator ``@linop.testing.spmd(workers=…)``: tests on several workers, from plain pytest.

The test runs on every rank of a persistent MPI job (`linop.testing.workers.jobs`); without MPI, on
threads (`linop.testing.workers.threaded`); and under ``mpiexec -n N pytest``, on the ranks of that
job (`linop.testing.workers.leading`). Hypothesis runs in one process. Here is the interface to
Hypothesis and pytest, and the choice of backend and number of workers.

Hypothesis, pytest and MPI are imported on first use, since ranks import this module, too.
"""

from __future__ import annotations

import functools
import inspect
import reprlib
import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

from linop import backends
from linop.errors import ArgumentError
from linop.testing.workers import jobs, leading, threaded
from linop.testing.workers.located import MARK, OWN, Located, pickled
from linop.testing.workers.outcome import Outcome
from linop.testing.workers.rank import is_strategy
from linop.testing.workers.session import OPTIONS, TALLY, skip

Test = TypeVar("Test", bound=Callable[..., Any])

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 80


def spmd(
    workers: Any, *, timeout: float | None = None, backend: str | None = None
) -> Callable[[Test], Test]:
    """Decorator that runs a test on several workers, as an SPMD program.

    The test is a function at the top level of a module. Its parameter ``backend`` is the worker's
    backend, which is also `linop.backends.current`; its parameter ``comm`` is an mpi4py
    communicator, a new one for every example. All other arguments (drawn by Hypothesis, or pytest's
    fixtures and parameters) are the same on all workers; they are sent to the ranks, and must be
    picklable. ``@given`` may be above or below this decorator.

    The test fails if it fails on any worker; if a worker dies, exceeds the timeout, or leaves a
    message unreceived or a thread running; and if some workers, but not all, call
    `hypothesis.assume` or `pytest.skip`.

    Args:
        workers: a number, a collection of numbers, or a Hypothesis strategy of numbers. Hypothesis
            draws the number, and shrinks it with the rest of the example; a test without Hypothesis
            runs on each number of a collection.
        timeout: of an example, in seconds; 30 by default. After a first timeout, further examples
            of the test get at most 5 seconds.
        backend: "mpi" or "threads"; by default "mpi" if mpi4py and ``mpiexec`` are available.

    Returns:
        The test for pytest and Hypothesis, without the parameters ``backend`` and ``comm``.

    Raises:
        ArgumentError: the test is not at the top level of a module, or `workers` or `backend` is
            invalid.

    Example:
        A file of tests, for plain ``pytest``, which starts the ranks::

            import hypothesis.strategies as st
            from hypothesis import given

            import linop

            @linop.testing.spmd(workers=st.integers(1, 4))
            @given(n=st.integers(1, 20))
            def test_of_my_program(n, backend):
                X = linop.TensorSpace((n,), linop.Partition((backend.workers,)))
                linop.testing.assert_adjoint(linop.halo_exchange(X, 1), backend)
    """
    if backend not in (None, "mpi", "threads"):
        raise ArgumentError(f"spmd: backend is 'mpi' or 'threads'; given {backend!r}")
    numbers = _numbers(workers)

    def decorate(test: Test) -> Test:
        if not callable(test):
            raise ArgumentError(f"spmd: expected a test function, given {test!r}")
        given = getattr(test, "hypothesis", None)
        inner = test if given is None else given.inner_test
        example = _example(Property(Located(inner), numbers, timeout, backend))
        again = example if given is None else _given_again(test, example)
        relax(again)
        return cast(Test, again)

    return decorate


def _numbers(workers: Any) -> Any:
    """The argument `workers` as a strategy, or as a sorted tuple of numbers.

    Raises:
        ArgumentError: it is neither.
    """
    if is_strategy(workers):
        return workers
    several = [workers] if isinstance(workers, int) else workers
    if not isinstance(several, Iterable) or isinstance(several, str):
        several = []
    numbers = set(several)
    if not numbers or any(type(n) is not int or n < 1 for n in numbers):
        raise ArgumentError(
            f"spmd: workers is a whole number from 1, a collection of them, or a strategy; "
            f"given {workers!r}"
        )
    return tuple(sorted(numbers))


class Property:
    """A test function with its numbers of workers, timeout and backend; runs one example a call.

    Args:
        located: the function.
        workers: a sorted tuple of numbers, or a strategy.
        timeout: in seconds; None for the default.
        backend: "mpi" or "threads"; None for the default.
    """

    def __init__(
        self, located: Located, workers: Any, timeout: float | None, backend: str | None
    ) -> None:
        self.located = located
        self.workers = workers
        self._timeout = timeout
        self._backend = backend
        self._hurry = False

    @property
    def backend(self) -> str:
        """The name of the backend: pytest's option, the test's own, or the default."""
        wanted = OPTIONS.backend or self._backend
        return wanted or ("threads" if jobs.missing_mpi() else "mpi")

    @property
    def watch(self) -> float:
        """The timeout of an example in seconds, reduced once an example has timed out."""
        watch = OPTIONS.timeout or self._timeout or jobs.WATCH
        return min(watch, jobs.HURRY) if self._hurry else watch

    def __call__(self, arguments: Mapping[str, Any]) -> None:
        """Run an example: within Hypothesis on a drawn number of workers, otherwise on each number
        of the collection."""
        __tracebackhide__ = True
        self._check()
        context = _hypothesis_context()
        if context is None and not isinstance(self.workers, tuple):
            self._draw(arguments)
            return
        for workers in self._allowed() if context is None else self._drawn(context):
            self.run(workers, arguments)

    def run(self, workers: int, arguments: Mapping[str, Any]) -> None:
        """Run an example on a number of workers.

        Raises:
            FailedExampleError: it failed on a worker.
            ArgumentError: an argument cannot be pickled.
        """
        __tracebackhide__ = True
        name = self.located.name
        data = pickled(name, arguments)
        TALLY.ran[self.backend, workers] += 1
        example = f"{name}({', '.join(f'{k}={_REPR.repr(v)}' for k, v in arguments.items())})"
        outcome = self._ask(example, workers, arguments, data)
        self._hurry |= outcome.timed_out
        outcome.settle()

    def _ask(
        self, example: str, workers: int, arguments: Mapping[str, Any], data: bytes
    ) -> Outcome:
        if self.backend == "threads":
            return threaded.ask(example, self.located, data, workers, self.watch)
        if leading.TEAM is not None:
            return leading.TEAM.ask(example, self.located, data, workers, self.watch)
        return jobs.job(workers).ask(example, self.located, (arguments,), self.watch)

    def _check(self) -> None:
        """Skip the test if it cannot run: no MPI, no communicator on threads, too few workers.

        Raises:
            ArgumentError: under ``mpiexec`` without the pytest plugin.
        """
        if self.backend == "threads" and "comm" in self.located.own:
            skip("it wants an MPI communicator, and runs on threads")
        if self.backend == "mpi" and (why := jobs.missing_mpi()):
            skip(why)
        if self.backend == "mpi" and leading.TEAM is None and backends.in_mpi_job():
            raise ArgumentError(
                "spmd: under mpiexec, ranks meet by pytest's plugin: pytest -p linop.testing.plugin"
            )
        if isinstance(self.workers, tuple) and not self._allowed():
            skip(f"it runs on {self.workers[0]} workers, and there are {self._most()}")

    def _most(self) -> float:
        """The largest number of workers available to the test."""
        ranks = leading.TEAM.size if leading.TEAM and self.backend == "mpi" else sys.maxsize
        return min(OPTIONS.workers or sys.maxsize, ranks)

    def _allowed(self) -> list[int]:
        """The numbers of the collection that are available; the others are tallied as left out."""
        allowed = [n for n in self.workers if n <= self._most()]
        for n in self.workers[len(allowed) :]:
            TALLY.left_out.add(f"{self.located.name} on {n}")
        return allowed

    def _drawn(self, context: Any) -> list[int]:
        """The numbers of workers of the example that Hypothesis is running: one that is drawn. An
        explicit `@example` has no choices to draw from: it runs on all numbers of a collection, or
        on the simplest one of a strategy."""
        import hypothesis
        from hypothesis import strategies as st

        explicit = context.data.max_choices == 0
        if isinstance(self.workers, tuple):
            allowed = self._allowed()
            if explicit or len(allowed) == 1:
                return allowed
            numbers: Any = st.sampled_from(allowed)
        else:
            numbers = self.workers.filter(self._fits)
        workers = _simplest(numbers) if explicit else context.data.draw(numbers)
        hypothesis.note(f"workers={workers}")
        return [workers]

    def _fits(self, workers: int) -> bool:
        if workers > self._most():
            TALLY.left_out.add(f"{self.located.name} on {workers}")
        return workers <= self._most()

    def _draw(self, arguments: Mapping[str, Any]) -> None:
        """Run a test that does not use Hypothesis on numbers drawn from a strategy."""
        import hypothesis
        from hypothesis import strategies as st

        def example(_: None) -> None:
            self(arguments)

        example.__name__ = self.located.name
        test = hypothesis.given(st.none())(example)
        relax(test)
        test()


def _hypothesis_context() -> Any:
    """The build context of the example that Hypothesis is running; None if there is none."""
    if "hypothesis" not in sys.modules:
        return None
    import hypothesis
    from hypothesis.control import current_build_context

    return current_build_context() if hypothesis.currently_in_test_context() else None


def _simplest(numbers: Any) -> int:
    """The simplest number of a strategy. Found in another thread, since Hypothesis does not nest in
    a running test."""
    import hypothesis

    settings = hypothesis.settings(database=None, derandomize=True)
    with ThreadPoolExecutor(1) as pool:
        found: int = pool.submit(
            hypothesis.find, numbers, lambda _: True, settings=settings
        ).result()
    return found


def _example(prop: Property) -> Any:
    """The function that pytest or Hypothesis calls for an example: the test's signature without the
    parameters in `OWN`."""
    signature = inspect.signature(prop.located.function)

    @functools.wraps(prop.located.function)
    def example(*args: Any, **kwargs: Any) -> None:
        __tracebackhide__ = True
        for name in prop.located.own:
            kwargs.pop(name, None)
        bound = example.__signature__.bind(*args, **kwargs)  # type: ignore[attr-defined]
        prop(bound.arguments)

    parameters = [p for p in signature.parameters.values() if p.name not in OWN]
    example.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    setattr(example, MARK, prop)
    return example


def _given_again(test: Any, example: Any) -> Any:
    """`given` applied again, with the strategies that it had for `test`, to `example`, which lacks
    the parameters in `OWN`: pytest would look for fixtures of these names. Attributes that other
    decorators of Hypothesis have set on the test are copied."""
    import hypothesis

    again = hypothesis.given(**test.hypothesis._given_kwargs)(example)
    left = {name: value for name, value in vars(test).items() if not name.startswith("__")}
    vars(again).update(left | {"hypothesis": again.hypothesis})  # type: ignore[attr-defined]
    return again


def relax(test: Any) -> None:
    """Adjust Hypothesis's settings of a test: no deadline, since an example may have to start
    ranks; no phase `explain`, which reruns a failing example many times. If `@settings` is above
    `@spmd`, the plugin calls this again.

    This sets Hypothesis's internal attribute: after its decorator, a user's `@settings` would be an
    error.
    """
    if "hypothesis" not in sys.modules:
        return
    from hypothesis import Phase, settings

    name = "_hypothesis_internal_use_settings"
    now: Any = getattr(test, name, None) or settings.default
    phases = [phase for phase in now.phases if phase is not Phase.explain]
    setattr(test, name, settings(now, deadline=None, phases=phases))
