"""Parallel programs compared with their sequential twins: one step of both is recorded on all ranks
(`recording`), what the ranks have is held against the twin's (`twins`), movements are lifted into
operators (`lifting`) and proven (`pairs`), and what differs is named with its cause (`faults`).
`check` has the functions for users, `mpi` the same for programs of mpi4py. `recording` and the
shadows of `mpi` need torch, and the rest compares arrays."""
