"""Krylov methods: linear systems, least squares, eigenvalues and singular values."""
