"""Time loops: a step repeated, with sources and receivers, as one operator or differentiable map.

`repeat` and `timeloop` are operators, and their adjoints run backwards. `evolution` is the loop of
a nonlinear step, or of one with parameters: a map whose Jacobian is an operator, with checkpoints.
"""

from linop.loops.checkpoints import Checkpoints, Counts, Every, Optimal
from linop.loops.evolution import Evolution, evolution
from linop.loops.linear import repeat, timeloop
from linop.loops.program import LoopProgram

__all__ = [
    "Checkpoints",
    "Counts",
    "Every",
    "Evolution",
    "LoopProgram",
    "Optimal",
    "evolution",
    "repeat",
    "timeloop",
]
