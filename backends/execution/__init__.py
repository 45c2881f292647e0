"""Execution of plans: binding to memory, generated source, array modules, result buffers, counters,
traces."""
