"""Calls of a bound plan, as generated functions: a run, with what surrounds it in every call
(alarms, progress, counters, failure).

`checked` calls take arrays that are validated already. A `fast` call is one that nearly every call
is: arrays that fit, a new result or one output array, no tracing; any other call is left to
`linop.backends.base.BoundPlan`, by returning `MISSED`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from linop.backends.execution.counters import Counters
from linop.backends.execution.functions import Form
from linop.backends.execution.program import Program
from linop.backends.transports.transport import Transport
from linop.spaces.scalars import Array

NEW, OUT, IN_PLACE = range(3)
"""Destination of a call's result: new memory, the ``out`` array, or the argument (``out=x``)."""
MISSED: Any = object()
"""Returned by a `Fast` call that is left to the general path."""
Fast = Callable[[Any, Any], Any]
"""Fast path of a plan's call: ``f(x, out)`` returns the result, or `MISSED`."""


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


def checked(program: Program, form: Form, caller: Caller) -> Callable[..., Sequence[Array]]:
    """A call with validated arguments and ``out`` arrays, under the plan's lock."""
    functions = program.functions
    lines, results = functions.text(form)
    parameters = [*functions.given, *(functions.passed if form.out else ())]
    text = _surrounded(program, lines, f"[{', '.join(results)}]", caller)
    # An alarm that was noticed in another plan's call may be about this one.
    heard = [f"{functions.emitter.name(caller.listen)}()"] if caller.listen else []
    return functions.emitter.function(parameters, [*heard, *text])


def fast(program: Program, how: int, caller: Caller) -> Fast:
    """The fast path of a bound plan; it always returns `MISSED` if the plan does not qualify.

    Args:
        how: `NEW`, `OUT` or `IN_PLACE`.
    """
    plan, functions = program.plan, program.functions
    inputs, outputs = plan.inputs, plan.outputs
    if how != NEW and (len(inputs) > 1 or len(outputs) != 1):
        return _miss
    if any(program.arrays.of(region.memory) is not program.arrays for region in inputs + outputs):
        return _miss
    same = [region.name for region in inputs] == [region.name for region in outputs]
    if how == IN_PLACE and not (same and plan.in_place):
        return _miss
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
    lines, results = functions.text(Form(how != NEW, how != NEW, stay))
    before = [] if taken else [f"{given} = x" for given in functions.given]
    before += [f"{passed} = out" for passed in functions.passed] if how != NEW else []
    result = results[0] if results else "None"
    if len(outputs) > 1:
        named = zip(outputs, results, strict=True)
        result = f"{{{', '.join(f'{region.name!r}: {array}' for region, array in named)}}}"
    call = _surrounded(program, [*before, *lines], result, caller)
    text = [
        *taken,
        f"if {wrong} or {name(caller.backend)}.tracing is not None: return {name(MISSED)}",
        f"if not {name(caller.lock.acquire)}(False): return {name(MISSED)}",
        "try:",
        *(f"    {line}" for line in call),
        f"finally: {name(caller.lock.release)}()",
    ]
    return functions.emitter.function(["x", "out"], text)


def _surrounded(program: Program, run: Sequence[str], result: str, caller: Caller) -> list[str]:
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
        f"return {result}",
    ]


def _miss(x: Any, out: Any) -> Any:
    """Fast path of plans that do not qualify."""
    del x, out
    return MISSED
