"""From stages to plans, without execution: routes, patterns, passes, lowering, verification; and
predictions: the cost of an operator, its traffic, its simulation on a network."""

from linop.planning.cost import Cost, Traffic
from linop.planning.network import Network
from linop.planning.simulation import Simulation, simulate
from linop.planning.traffic import TrafficMatrix, traffic_matrix
from linop.planning.verification.verifier import verify_plans

__all__ = [
    "Cost",
    "Network",
    "Simulation",
    "Traffic",
    "TrafficMatrix",
    "simulate",
    "traffic_matrix",
    "verify_plans",
]
