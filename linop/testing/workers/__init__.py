"""Property tests on several workers: ``@linop.testing.spmd``."""
