"""Faults of time loops."""

from __future__ import annotations

from mutation.fault import Fault

ANYWHERE = "test_time_loops.py::test_loops_stand_anywhere"
CHAIN = "test_evolution.py::test_a_loop_is_the_chain_of_its_steps"

LOOPS = (
    Fault(
        "an adjoint that runs forwards",
        "the adjoint of a time loop takes the first record first",
        "order",
        "linop.loops.loop:Loop._adjoint",
        "not self.backwards",
        "self.backwards",
        ("test_time_loops.py::test_solvers_take_loops",),
    ),
    Fault(
        "one buffer for two states",
        "a step writes its state where it reads the one before",
        "aliasing",
        "linop.backends.engine.driving:LoopPlan._other",
        "left % 2",
        "0",
        (ANYWHERE,),
    ),
    Fault(
        "a loop that starts where it ended",
        "an initial state that is no part of the domain is not set to zero",
        "omission",
        "linop.backends.engine.driving:LoopPlan._zeros",
        "array[...] = 0",
        "array[...] = array",
        (ANYWHERE,),
    ),
    Fault(
        "an argument for scratch",
        "the first step overwrites the initial state that the user gave",
        "aliasing",
        "linop.backends.engine.driving:LoopPlan._first",
        "not self._overwritten",
        "True",
        ("test_time_loops.py::test_on_threads",),
    ),
    Fault(
        "arguments that are read twice",
        "a sum takes the memory of an argument that other steps of its stage read",
        "aliasing",
        "linop.planning.fusion:_added_alone",
        "read.count(name) == 1",
        "True",
        ("test_plan_passes.py::test_arguments_that_are_needed_are_not_overwritten",),
    ),
    Fault(
        "the last step's parameter alone",
        "the gradient with respect to what all steps share is that of the first step",
        "overwriting",
        "linop.loops.program:LoopProgram._back",
        "sums[name] += found[name]",
        "sums[name] = found[name]",
        (CHAIN,),
    ),
    Fault(
        "a derivative at the wrong state",
        "a step on the way back is not computed again at its state",
        "address",
        "linop.loops.checkpoints:Every._back",
        "yield Action(LOAD, k)",
        "yield Action(LOAD, start)",
        ("test_evolution.py::test_schedules_meet_every_step_backwards",),
    ),
)
