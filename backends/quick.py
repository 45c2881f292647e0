"""The call of a plan that nearly every call is, as one function: an array that fits, new memory for
the result, nobody who records or interrupts.

Everything else it leaves to `linop.backends.base.BoundPlan`, by returning `MISSED`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from linop.backends.base import MISSED, BoundPlan
from linop.backends.execute import Program
from linop.backends.transport import Transport


def quick_call(
    plan: BoundPlan,
    program: Program,
    transport: Transport,
    tag: int,
    listen: Callable[[], None],
    fail: Callable[[BaseException], None],
) -> Callable[[Any], Any] | None:
    """What calls a bound plan; None where its arguments or results are several arrays.

    Args:
        tag: what the transport is told to be busy with.
        listen: is called where there may be an alarm.
        fail: is called where a run ends halfway.
    """
    inputs, outputs = program.plan.inputs, program.plan.outputs
    if len(inputs) > 1 or len(outputs) > 1:
        return None
    name = program.code.name
    wrong = "x is not None"
    if inputs:
        dtype = name(program.plan.dtype)
        wrong = f"type(x) is not ndarray or x.shape != {name(inputs[0].shape)}"
        wrong += f" or (x.dtype is not {dtype} and x.dtype != {dtype})"
    lock, clock, counters = plan.lock, name(time.perf_counter), name(plan.counters)
    if program.fresh is None:
        run = [f"results = {name(program.run)}({'(x,)' if inputs else '()'})"]
        results = ["results[0]"]
    else:
        lines, results = program.lines(given=False)
        run = [f"{cell.name} = x" for cell in program.inputs] + lines
    text = [
        f"if {wrong} or {name(plan.backend)}.tracing is not None: return {name(MISSED)}",
        f"if not {name(lock.acquire)}(False): return {name(MISSED)}",
        "try:",
        f"    if {name(transport.alarmed)}(): {name(listen)}()",
        f"    {name(transport)}.busy = {tag}",
        f"    begun = {clock}()",
        "    try:",
        *(f"        {line}" for line in run or ["pass"]),
        "    except BaseException as error:",
        f"        {name(fail)}(error)",
        "        raise",
        f"    {counters}.calls += 1",
        f"    {counters}.seconds += {clock}() - begun",
        f"finally: {name(lock.release)}()",
        f"return {results[0] if outputs else None}",
    ]
    return program.code.function(["x"], text)
