"""Linear maps of every kind, as checks take them."""
