"""Layouts of all tensors of a call, from function to function."""
