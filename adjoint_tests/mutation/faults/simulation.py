"""Faults of the simulation of pipeline schedules."""

from __future__ import annotations

from mutation.fault import Fault

SIMULATION = (
    Fault(
        "cores for all",
        "actions do not wait for a free core",
        "synchronisation",
        "linop.schedules.simulation:_times",
        "max(start, free[0])",
        "start",
        ("test_simulation_events.py::test_one_core_does_all_work_in_turn",),
    ),
    Fault(
        "idle time of the work",
        "the bubble of the total is divided by the work alone",
        "coefficient",
        "linop.schedules.simulation:Simulation.bubble_of_total",
        "self.time * len(self.workers)",
        "sum(self.busy)",
        ("test_simulation_formulas.py::test_gpipe",),
    ),
    Fault(
        "messages overtake",
        "messages from one worker to another do not wait for each other",
        "order",
        "linop.schedules.dependencies:_Builder.orders",
        "self.needs[k].append(channels[channel])",
        "pass",
        ("test_simulation_events.py::test_messages_beside_computation",),
    ),
    Fault(
        "a slot more than there is",
        "a send waits for the receive of one message later than its slot's",
        "boundary",
        "linop.schedules.dependencies:_Builder.orders",
        "number >= limit",
        "number > limit",
        ("test_simulation_events.py::test_slots_make_sends_wait",),
    ),
    Fault(
        "gradients cost what data cost",
        "the time of a gradient's message is that of the edge's operator, not of its adjoint",
        "replication",
        "linop.schedules.costs:of_messages.time",
        "cost if kind == Kind.SEND_F else cost.H",
        "cost",
        ("test_simulation_events.py::test_costs_of_edges_by_operator",),
    ),
    Fault(
        "recomputation for nothing",
        "a backward that repeats its forward takes no longer",
        "omission",
        "linop.schedules.costs:of_computations.cost",
        "recompute and action.kind in BACKWARDS",
        "False",
        ("test_simulation_formulas.py::test_gpipe_with_recomputation",),
    ),
    Fault(
        "recomputation frees nothing",
        "with recomputation, activations are kept from the forward on",
        "memory",
        "linop.schedules.live_memory:live",
        "BACKWARDS if recompute else {Kind.FORWARD}",
        "{Kind.FORWARD}",
        ("test_simulation_formulas.py::test_gpipe_with_recomputation",),
    ),
)
