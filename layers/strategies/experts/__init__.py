"""Experts: every worker of an axis has some of them, and tokens of its own."""
