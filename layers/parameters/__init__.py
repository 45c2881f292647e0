"""Parameters in blocks, and what is computed from all of them."""
