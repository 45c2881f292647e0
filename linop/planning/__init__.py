"""From stages to plans, without execution: routes, patterns, passes, lowering, verification; and
predictions: the cost of an operator, its traffic, its simulation on a network, its timeline."""

from linop.planning.network import Link, Network
from linop.planning.placement import Placement
from linop.planning.prediction.cost import Cost, Traffic
from linop.planning.prediction.simulation import Simulation, simulate
from linop.planning.prediction.timeline import Timeline, timeline
from linop.planning.prediction.traffic import TrafficMatrix, traffic_matrix
from linop.planning.verification.verifier import verify_plans

__all__ = [
    "Cost",
    "Link",
    "Network",
    "Placement",
    "Simulation",
    "Timeline",
    "Traffic",
    "TrafficMatrix",
    "simulate",
    "timeline",
    "traffic_matrix",
    "verify_plans",
]
