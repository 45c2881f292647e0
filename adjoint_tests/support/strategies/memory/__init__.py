"""Blocks that keep less for backward, and the bytes that they keep."""
