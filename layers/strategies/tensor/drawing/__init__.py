"""Random numbers of tensors, which belong to them and not to workers."""
