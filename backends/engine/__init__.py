"""Backends, their workers and bound plans: what all media share. It knows none of them."""
