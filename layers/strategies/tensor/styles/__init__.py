"""Styles of a plan: how each named module is made parallel."""
