"""Pipelines beside one process: whole, cut and unusual stages, and what they refuse."""
