"""Parallel torch programs compared with their sequential twins: one step of both is recorded on all
ranks, and what differs is named, with its place. `check` has the functions for users; `recorder`
and `steps` need torch, and the rest compares arrays."""
