"""Pieces of which `right.py` puts its programs together: models and strategies."""
