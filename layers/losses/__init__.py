"""Losses of tensors in blocks."""
