"""Distributed parameters: their blocks, initialisation, gradient norms, and guards on torch."""
