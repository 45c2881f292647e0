"""Attention over blocks of heads and of sequences."""
