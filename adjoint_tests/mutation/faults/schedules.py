"""Faults of pipeline schedules: their generators and their check."""

from __future__ import annotations

from mutation.fault import Fault

PLANTED = "test_checker.py::test_each_planted_fault_has_its_own_error"
DRAWN = ("test_checker.py::test_broken_schedules", "test_checker.py::test_drawn_schedules")

SCHEDULES = (
    Fault(
        "one warm-up forward too few",
        "stages of 1F1B begin with one forward less: the table of fewer stages",
        "boundary",
        "linop.schedules.generators:one_forward_one_backward",
        "stages - 1 - s",
        "max(0, stages - 2 - s)",
        ("test_torch_tables.py::test_1f1b_is_torchs_but_for_its_last_row",),
    ),
    Fault(
        "PipeDream forgets its delay",
        "forwards of PipeDream read the version of their own number",
        "synchronisation",
        "linop.schedules.generators:pipedream",
        "max(0, m - late)",
        "m",
        ("test_checker.py::test_peaks_are_those_of_the_table",),
    ),
    Fault(
        "messages without their other end",
        "the other end of a message is no part of it",
        "address",
        "linop.schedules.completeness:key_of",
        "action.other",
        "None",
        (f"{PLANTED}[a message without an edge]",),
    ),
    Fault(
        "half a backward is one",
        "a stage passes that lacks one of the halves of a backward",
        "blind",
        "linop.schedules.completeness:check_computations",
        "has not in ([F, B], [F, I, W])",
        "has == [F]",
        (f"{PLANTED}[half a backward]",),
    ),
    Fault(
        "a receive may come late",
        "forwards do not wait for what comes from another worker",
        "blind",
        "linop.schedules.completeness:check_dependencies",
        "at[key_of(needed)] > index",
        "needed.other is None and at[key_of(needed)] > index",
        (f"{PLANTED}[a receive after its use]",),
    ),
    Fault(
        "versions of backwards unread",
        "the version of a backward may be newer than its forward's",
        "blind",
        "linop.schedules.parameter_use:check_versions",
        "version != read",
        "version < read",
        (f"{PLANTED}[another version in the backward]",),
    ),
    Fault(
        "one version too many is kept",
        "a version that was replaced is kept for one update more",
        "boundary",
        "linop.schedules.parameter_use:check_versions",
        "version <= newest[s] - kept[s]",
        "version < newest[s] - kept[s]",
        ("test_checker.py::test_kept_versions",),
    ),
    Fault(
        "sends never wait for their receive",
        "sends that wait for their receive are taken for sends with a slot",
        "synchronisation",
        "linop.schedules.message_flow:check_deadlock",
        "number == 0",
        "False",
        ("test_checker.py::test_generated_schedules",),
    ),
    Fault(
        "one slot too many",
        "a send waits only when more messages than slots are on their way",
        "boundary",
        "linop.schedules.message_flow:check_deadlock",
        "step.number < received[step.edge] + number",
        "step.number <= received[step.edge] + number",
        ("test_checker.py::test_slots_may_be_too_few",),
    ),
    Fault(
        "clocks of one worker alone",
        "a receive does not pass on what its sender knew to be over",
        "local",
        "linop.schedules.message_flow:slots_needed",
        "map(max, own, sent.pop((step.edge, step.number)))",
        "list(own)",
        ("test_checker.py::test_limit_of_memory", *DRAWN),
    ),
    Fault(
        "half a backward frees activations",
        "activations are counted as free after the gradient of the input",
        "memory",
        "linop.schedules.live_memory:live",
        "(Kind.BACKWARD, Kind.BACKWARD_WEIGHT)",
        "(Kind.BACKWARD, Kind.BACKWARD_INPUT)",
        ("test_checker.py::test_peaks_are_those_of_the_table",),
    ),
)
