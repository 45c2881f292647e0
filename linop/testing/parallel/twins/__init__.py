"""Tensors, parameters, buffers and losses of the ranks of a program beside those of its twin, and
how they are related."""
