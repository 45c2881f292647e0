"""Regions, spaces and vectors, exact numbers, partitions, tensor spaces."""
