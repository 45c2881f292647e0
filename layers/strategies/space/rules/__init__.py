"""Rules of torch's functions on cut tensors, by what the functions mean."""
