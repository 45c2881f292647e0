"""Mixtures of experts: tokens go to the workers of their experts, and come back."""
