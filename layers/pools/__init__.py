"""Pools: kernels over space, and those that adapt to the size of an output."""
