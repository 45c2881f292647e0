"""Parallel programs of mpi4py, compared with their sequential twins, and pairs of forward and
adjoint functions: `check_mpi`."""

from linop.testing.parallel.mpi.check import check_mpi

__all__ = ["check_mpi"]
