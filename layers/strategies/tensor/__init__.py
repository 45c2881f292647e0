"""Tensor and sequence parallel modules: weights in blocks over one axis of a mesh. The public names
are those of `linop.strategies`."""
