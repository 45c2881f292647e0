"""Proofs about plans, found without running them."""
