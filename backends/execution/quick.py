"""Fast path of a plan's call, as one generated function: one input array that fits, one output
array, no tracing.

Any other call is left to `linop.backends.base.BoundPlan`, by returning `MISSED`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from linop.backends.base import IN_PLACE, MISSED, NEW, BoundPlan, Quick
from linop.backends.execution.program import Form, Program
from linop.backends.transports.transport import Transport


def quick_call(
    plan: BoundPlan,
    program: Program,
    how: int,
    transport: Transport,
    tag: int,
    listen: Callable[[], None] | None,
    fail: Callable[[BaseException], None],
) -> Quick:
    """Generate the fast path of a bound plan.

    Args:
        how: `NEW`, `OUT` or `IN_PLACE`.
        tag: the plan's tag, set as the transport's `busy`.
        listen: called if an alarm may be pending; None if the plan has no other workers.
        fail: called with the exception if a run fails.

    Returns:
        ``f(x, out)``, which always returns `MISSED` if the plan does not qualify.
    """
    inputs, outputs = program.plan.inputs, program.plan.outputs
    if len(inputs) > 1 or len(outputs) > 1 or (how != NEW and not outputs):
        return _miss
    if any(program.arrays.of(region.memory) is not program.arrays for region in inputs + outputs):
        return _miss
    same = bool(inputs) and inputs[0].name == outputs[0].name if outputs else False
    if how == IN_PLACE and not (same and program.plan.in_place):
        return _miss
    name = program.code.name
    dtype = name(program.plan.dtype)

    def unfit(array: str, shape: tuple[int, ...]) -> str:
        wrong = f"type({array}) is not ndarray or {array}.shape != {name(shape)}"
        return f"{wrong} or ({array}.dtype is not {dtype} and {array}.dtype != {dtype})"

    wrong = unfit("x", inputs[0].shape) if inputs else "x is not None"
    if how != NEW:
        plain = program.arrays.plain
        wrong += f" or {unfit('out', outputs[0].shape)} or not out.flags.{plain}"
        if inputs and how != IN_PLACE:
            wrong += f" or {name(program.arrays.module.may_share_memory)}(x, out)"
    lines, result = _run(program, how)
    counters, clock = name(plan.counters), name(time.perf_counter)
    text = [
        f"if {wrong} or {name(plan.backend)}.tracing is not None: return {name(MISSED)}",
        f"if not {name(plan.lock.acquire)}(False): return {name(MISSED)}",
        "try:",
        *([f"    if {name(transport.alarmed)}(): {name(listen)}()"] if listen else []),
        f"    {name(transport)}.busy = {tag}",
        f"    {name(transport.recorder.note)}({tag})",
        f"    {counters}.begun = begun = {clock}()",
        "    try:",
        *(f"        {line}" for line in lines or ["pass"]),
        "    except BaseException as error:",
        f"        {name(fail)}(error)",
        "        raise",
        f"    {counters}.calls += 1",
        f"    {counters}.seconds += {clock}() - begun",
        f"    return {result}",
        f"finally: {name(plan.lock.release)}()",
    ]
    return program.code.function(["x", "out"], text)


def _run(program: Program, how: int) -> tuple[list[str], str]:
    """Lines of a run, and the expression of its result."""
    out = how != NEW
    outputs = program.plan.outputs if how == IN_PLACE else ()
    names = frozenset(region.name for region in outputs)
    lines, results = program.text(Form(out=out, straight=out, in_place=names))
    before = [f"{cell.name} = x" for cell in program.inputs]
    before += [f"{passed} = out" for passed in program.passed] if out else []
    return [*before, *lines], results[0] if results else "None"


def _miss(x: Any, out: Any) -> Any:
    """Fast path of plans that do not qualify."""
    del x, out
    return MISSED
