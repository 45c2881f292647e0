"""Data parallel training: replicated and sharded parameters, and their gradients."""
