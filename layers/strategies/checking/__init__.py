"""Parallel models compared with their sequential twins."""
