"""Predictions without execution: the cost of an operator, its traffic, its simulation on a network,
and a better order of its workers."""
