"""Plans in torch's autograd."""
