"""Time loops as operators: a step, repeated, with sources and receivers."""

from linop.loops.linear import repeat, timeloop

__all__ = ["repeat", "timeloop"]
