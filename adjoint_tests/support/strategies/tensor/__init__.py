"""Tensor and sequence parallel networks beside their sequential twins."""
