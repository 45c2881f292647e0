"""How workers agree on a layer's call, and what errors say of it."""
