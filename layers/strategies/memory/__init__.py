"""Less memory for activations: they are computed again, or rebuilt by an inverse."""
