"""Strategies inside each other, and `linop.strategies.check`."""
