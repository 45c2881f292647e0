"""Time loops of linear steps."""

from __future__ import annotations

from typing import Any

from linop.errors import ArgumentError, SpaceError
from linop.loops.loop import Loop, side_of
from linop.loops.over_time import NOTHING, Series, renaming, series, steps
from linop.operators.algebra import Named, hstack, identity, in_steps, vstack, within
from linop.operators.expressions import compose
from linop.operators.operator import LinearOperator
from linop.operators.real_linear import RealLinear
from linop.operators.simplification import in_order
from linop.provenance import records_origin
from linop.spaces.space import Space


@records_origin
def repeat(A: LinearOperator, n: int) -> LinearOperator:
    """A applied n times, as a loop: the map ``A ** n``, which runs the one plan of A n times, and
    whose adjoint runs that of ``A.H``.

    ``A ** n`` is a product of n factors instead: it can be merged (a power of data movement is one
    movement), proven equal to others and drawn, and its plan has the stages of all factors.

    Args:
        A: from a space to itself.
        n: from 0; 0 gives the identity.

    Raises:
        ArgumentError: A is no operator, or n no whole number from 0. SpaceError: A's domain and
            codomain differ.

    Example:
        >>> X = linop.TensorSpace((4,), linop.Partition(4))
        >>> A = linop.repeat(linop.shift(X, 1), 3)
        >>> (A @ np.arange(4.0)).tolist()
        [1.0, 2.0, 3.0, 0.0]
        >>> (A.H @ A @ np.arange(4.0)).tolist()
        [0.0, 1.0, 2.0, 3.0]
    """
    A, n = _step("repeat", A), steps("repeat", n)
    if not A.clinear:
        return RealLinear(repeat(A.over_reals(), n), A.domain, A.codomain)
    return Loop(A, A.domain, n, NOTHING, NOTHING, True, True)


@records_origin
def timeloop(
    step: LinearOperator,
    n: int,
    sources: LinearOperator | None = None,
    receivers: LinearOperator | None = None,
    *,
    initial: bool | None = None,
    final: bool | None = None,
) -> LinearOperator:
    """n time steps x ← A x + S s_k, with records r_k = R x, for k = 0, 1, …, n - 1, as one operator
    from signals to records. Record k is taken after step k, so that it hears signal k.

    It is a block lower triangular operator, r_j = Σ R A^(j-k) S s_k over k ≤ j, and runs as a loop:
    the step is compiled once, whatever n is. The adjoint is the loop of the step's adjoint from
    the last record to the first signal, x ← Aᴴ (x + Rᴴ r_k) with signals Sᴴ (x + Rᴴ r_k).

    Args:
        step: A, from the space of states to itself.
        n: number of steps, from 0.
        sources: S, from the space of one signal to that of states; by default no signals.
        receivers: R, from the space of states to that of one record; by default no records.
        initial: True if the initial state is a part of the domain, before the signals; else it is
            zero. By default it is if there are no signals.
        final: True if the final state is a part of the codomain, before the records. By default it
            is if there are no records.

    Returns:
        The operator. Signals and records of all steps are in the regions of one signal and one
        record with a first dimension for time, ``(n, *shape)``; a `TensorSpace` stays one.

    Raises:
        ArgumentError: an argument is no operator, or n no whole number from 0; or domain or
            codomain would be empty. SpaceError: A's domain and codomain differ, or S leads to
            another space, or R starts from another; or a dtype differs. RegionError: the state and
            the signals (records) are both given (returned), and have regions of one name.

    Example:
        >>> x = linop.Region("x", 1)
        >>> half = linop.local_operators.matrix([[0.5]], x, x)
        >>> S = linop.identity(half.domain)
        >>> A = linop.timeloop(half, 3, sources=S, receivers=S)
        >>> A.todense().tolist()
        [[1.0, 0.0, 0.0], [0.5, 1.0, 0.0], [0.25, 0.5, 1.0]]
        >>> (A.H @ np.array([[0.0], [0.0], [4.0]])).ravel().tolist()
        [1.0, 2.0, 4.0]
    """
    A, n = _step("timeloop", step), steps("timeloop", n)
    X = A.domain
    initial = sources is None if initial is None else initial
    final = receivers is None if final is None else final
    hears, speaks = initial or sources is not None, final or receivers is not None
    if not (hears and speaks):
        side, what = ("final", "receivers") if hears else ("initial", "sources")
        raise ArgumentError(f"timeloop: {side}=False without {what} leaves nothing; give {what}")
    coming, going = series_of("timeloop", n, sources, receivers, X)
    given = [op for op in (A, sources, receivers) if op is not None]
    if not all(op.clinear for op in given):
        forms = [None if op is None else op.over_reals() for op in (sources, receivers)]
        form = timeloop(A.over_reals(), n, *forms, initial=initial, final=final)
        return RealLinear(form, side_of(X, initial, coming), side_of(X, final, going))
    before, after = wired(X, sources, receivers, coming, going)
    # In steps: the state is made once, for what goes out and for the next step, there and back.
    ahead = compose(before, within(in_order(A, X, X), before.domain))
    body = Named("Step", "", ahead if receivers is None else in_steps(after, ahead))
    return Loop(body, X, n, coming, going, initial, final)


def series_of(
    what: str, n: int, sources: LinearOperator | None, receivers: LinearOperator | None, X: Space
) -> tuple[Series, Series]:
    """Signals and records over time, of sources and receivers of states in X.

    Raises:
        ArgumentError, SpaceError: as `timeloop`.
    """
    coming = going = NOTHING
    if sources is not None:
        _check_port(f"{what}, sources", sources, "codomain", X)
        coming = series(sources.domain, n, "·in")
    if receivers is not None:
        _check_port(f"{what}, receivers", receivers, "domain", X)
        going = series(receivers.codomain, n, "·out")
    return coming, going


def wired(
    X: Space,
    sources: LinearOperator | None,
    receivers: LinearOperator | None,
    coming: Series,
    going: Series,
) -> tuple[LinearOperator, LinearOperator]:
    """The operators before and after a step: of states, and of signals and records of one step."""
    before = after = identity(X)
    if sources is not None:
        signals = renaming(sources.domain, coming.names).euclidean_adjoint
        before = hstack(before, in_order(compose(sources, signals), coming.at(), X))
    if receivers is not None:
        records = renaming(receivers.codomain, going.names)
        after = vstack(after, in_order(compose(records, receivers), X, going.at()))
    return before, after


def _step(what: str, A: Any) -> LinearOperator:
    if not isinstance(A, LinearOperator):
        raise ArgumentError(f"{what}, step: expected an operator, given {A!r}")
    if A.domain != A.codomain:
        A.domain.same_as(A.codomain, f"{what}: the step must map the space of states to itself; A")
    return A


def _check_port(what: str, op: Any, side: str, X: Space) -> None:
    """Check that one side of sources or receivers is the space of states."""
    if not isinstance(op, LinearOperator):
        raise ArgumentError(f"{what}: expected an operator or None, given {op!r}")
    space: Space = getattr(op, side)
    if space != X:
        raise SpaceError(f"{what}: its {side} must be the space of states, {X!r}; given {space!r}")
