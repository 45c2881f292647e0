"""Causes of wrong gradients and losses: the module, the line and the operator that is missing or
too many."""
