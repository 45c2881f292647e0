"""Pipelines of stages: a checked schedule, run by torch's autograd and edges that are operators."""
