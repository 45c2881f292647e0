"""Convolutions and transposed ones, and the algorithm that they share."""
