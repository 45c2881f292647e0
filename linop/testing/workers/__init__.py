"""Property tests on several workers (``@linop.testing.spmd``): the decorator, and the three ways to
run an example: on a job of ranks, on threads, on the ranks of ``mpiexec pytest``."""
