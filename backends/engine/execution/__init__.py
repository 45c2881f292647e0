"""Execution of plans: binding to memory, instructions, generated source, counters, traces. Array
modules and the memory of results are in `linop.backends.engine.arrays`."""
