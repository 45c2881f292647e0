"""Calls of a bound plan, as generated functions: a run, with what surrounds it in every call
(alarms, progress, counters, failure).

A `fast` call is one that nearly every call is: arrays that fit, a new result or one output array,
no tracing; any other is left to a `checked` call, by returning `MISSED`, which takes arrays that
are validated already. ``start`` and ``finish`` run the same text, as a generator that stops where
it would have to wait.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from linop.backends.engine.counters import Counters
from linop.backends.engine.execution.functions import LATE, Form
from linop.backends.engine.execution.instructions import Instruction
from linop.backends.engine.execution.program import Program
from linop.backends.together.transport import Transport

NEW, OUT, IN_PLACE = range(3)
"""Destination of a call's result: new memory, the ``out`` array, or the argument (``out=x``)."""
MISSED: Any = object()
"""Returned by a `Fast` call that is left to the general path."""
Fast = Callable[..., Any]
"""Fast path of a plan's call: ``f(x, out)`` returns the result, or `MISSED`; ``f(x, out, True)``
under the plan's lock."""


class Caller(NamedTuple):
    """The plan whose calls these are.

    Attributes:
        backend: calls are not fast while its ``tracing`` is not None.
        tag: the plan's tag, set as the transport's `busy`.
        listen: called if an alarm may be pending; None if the plan has no other workers.
        fail: called with the exception if a run fails.
    """

    backend: object
    lock: threading.Lock
    counters: Counters
    transport: Transport
    tag: int
    listen: Callable[[], None] | None
    fail: Callable[[BaseException], None]


def checked(
    program: Program, form: Form, caller: Caller, halves: bool = False
) -> Callable[..., Any]:
    """A call with validated arguments and ``out`` arrays, under the plan's lock.

    Args:
        halves: a generator instead, for `Program.begin`: it stops once, before the first
            instruction that would have to wait, or at the end, and yields the results when sent
            True.
    """
    functions, name = program.functions, program.functions.emitter.name
    counters, clock = name(caller.counters), name(time.perf_counter)

    def stop(condition: str, at: object) -> list[str]:
        return [
            f"if not go{condition}:",
            f"    {counters}.seconds += {clock}() - begun",
            f"    try: go = yield {at}",
            "    except GeneratorExit: return",  # the run is abandoned
            f"    {name(caller.transport)}.busy = {caller.tag}",
            f"    begun = {clock}()",
        ]

    def stops(number: int, step: Instruction) -> list[str]:
        waits = program.stops(number, step)
        return stop(f" and {waits}", number) if waits else []

    lines, results = functions.text(form, stops) if halves else functions.text(form)
    if halves:
        lines = ["go = False", *lines, *stop("", None)]
    parameters = [*functions.given, *(functions.passed if form.out else ())]
    text = _surrounded(program, lines, f"[{', '.join(results)}]", caller, halves)
    # An alarm that was noticed in another plan's call may be about this one.
    heard = [f"{name(caller.listen)}()"] if caller.listen and not halves else []
    return functions.emitter.function(parameters, [*heard, *text])


def fast(program: Program, how: int, caller: Caller) -> Fast:
    """The fast path of a bound plan; it always returns `MISSED` if the plan does not qualify.

    Args:
        how: `NEW`, `OUT` or `IN_PLACE`.
    """
    fitting = _fitting(program, how, caller)
    if fitting is None:
        return _miss
    plan, functions = program.plan, program.functions
    name = functions.emitter.name
    lines, results = functions.text(fitting.form)
    result = results[0] if results else "None"
    if len(plan.outputs) > 1:
        named = zip(plan.outputs, results, strict=True)
        result = f"{{{', '.join(f'{region.name!r}: {array}' for region, array in named)}}}"
    call = _surrounded(program, lines, result, caller)
    text = [
        *fitting.lines,
        f"if not (held or {name(caller.lock.acquire)}(False)): return {name(MISSED)}",
        "try:",
        *(f"    {line}" for line in call),
        "finally:",
        f"    if not held: {name(caller.lock.release)}()",
    ]
    return functions.emitter.function(["x", "out", "held=False"], text)


def fast_start(program: Program, how: int, caller: Caller) -> Fast:
    """As `fast`, under the plan's lock: returns the generator of a call in two halves (`checked`),
    or `MISSED`."""
    fitting = _fitting(program, how, caller)
    if fitting is None:
        return _miss
    functions, form = program.functions, fitting.form
    begin = functions.emitter.name(checked(program, form, caller, halves=True))
    given = ", ".join([*functions.given, *(functions.passed if form.out else ())])
    return functions.emitter.function(["x", "out"], [*fitting.lines, f"return {begin}({given})"])


class _Fitting(NamedTuple):
    """Lines of a function of ``x`` and ``out`` that return `MISSED` if these do not fit, and else
    set the variables of arguments and ``out`` arrays; and the form of such a run."""

    lines: list[str]
    form: Form


def _fitting(program: Program, how: int, caller: Caller) -> _Fitting | None:
    """The beginning of a fast path; None if the plan does not qualify."""
    plan, functions = program.plan, program.functions
    inputs, outputs = plan.inputs, plan.outputs
    if how != NEW and (len(inputs) > 1 or len(outputs) != 1):
        return None
    if any(program.arrays.of(region.memory) is not program.arrays for region in inputs + outputs):
        return None
    same = [region.name for region in inputs] == [region.name for region in outputs]
    if how == IN_PLACE and not same:
        return None
    name = functions.emitter.name

    def unfit(array: str, shape: tuple[int, ...]) -> str:
        return functions.emitter.unlike(array, shape, plan.dtype)

    wrong = unfit("x", inputs[0].shape) if inputs else "x is not None"
    taken: list[str] = []
    if len(inputs) > 1:
        pairs = list(zip(functions.given, inputs, strict=True))
        taken = [f"if type(x) is not dict or len(x) != {len(pairs)}: return {name(MISSED)}"]
        taken += [f"{given} = x.get({region.name!r})" for given, region in pairs]
        wrong = " or ".join(unfit(given, region.shape) for given, region in pairs)
    if how != NEW:
        wrong += f" or {unfit('out', outputs[0].shape)} or not out.flags.{program.arrays.plain}"
        if inputs and how != IN_PLACE:
            wrong += f" or {name(program.arrays.module.may_share_memory)}(x, out)"
    stay = frozenset(region.name for region in outputs if how == IN_PLACE)
    form = LATE if stay and not plan.in_place else Form(how != NEW, how != NEW, stay)
    after = [] if taken else [f"{given} = x" for given in functions.given]
    after += [f"{passed} = out" for passed in functions.passed] if how != NEW else []
    missed = f"if {wrong} or {name(caller.backend)}.tracing is not None: return {name(MISSED)}"
    return _Fitting([*taken, missed, *after], form)


def _surrounded(
    program: Program, run: Sequence[str], result: str, caller: Caller, halves: bool = False
) -> list[str]:
    """Lines of a call around those of its run."""
    name = program.functions.emitter.name
    transport, counters = name(caller.transport), name(caller.counters)
    clock, listen = name(time.perf_counter), caller.listen
    return [
        *([f"if {name(caller.transport.alarmed)}(): {name(listen)}()"] if listen else []),
        f"{transport}.busy = {caller.tag}",
        f"{name(caller.transport.recorder.note)}({caller.tag})",
        f"{counters}.begun = begun = {clock}()",
        "try:",
        *(f"    {line}" for line in run or ["pass"]),
        "except BaseException as error:",
        f"    {name(caller.fail)}(error)",
        "    raise",
        f"{counters}.calls += 1",
        f"{counters}.seconds += {clock}() - begun",
        f"{'yield' if halves else 'return'} {result}",
    ]


def _miss(x: Any, out: Any, held: bool = False) -> Any:
    """Fast path of plans that do not qualify."""
    del x, out, held
    return MISSED
