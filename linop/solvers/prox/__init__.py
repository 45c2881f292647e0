"""Proximal maps: functions f of vectors with ``f(v)``, their values, and ``f.prox(v, step)``, the
minimizer x of f(x) + ‖x - v‖² / (2 step).

They take vectors of any backend, whole ones or the part of one worker; real and complex (moduli
take the place of absolute values). Values are collective where vectors are distributed; a map says
so where its `prox` is.
"""

from linop.solvers.prox.elementwise import box, l1, user
from linop.solvers.prox.maps import ProximalMap
from linop.solvers.prox.norms import group, l2, nuclear
from linop.solvers.prox.quadratic import squared_l2
from linop.solvers.prox.total_variation import gradient, total_variation

__all__ = [
    "ProximalMap",
    "box",
    "gradient",
    "group",
    "l1",
    "l2",
    "nuclear",
    "squared_l2",
    "total_variation",
    "user",
]
