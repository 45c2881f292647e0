"""Ranks with the arrays of a device: messages over MPI, staged or as they are, and over NCCL."""
