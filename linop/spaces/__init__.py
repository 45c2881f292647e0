"""Regions, spaces, vectors, exact numbers, partitions and tensor spaces; no operators."""
