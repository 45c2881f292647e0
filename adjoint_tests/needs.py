"""What tests need."""

from __future__ import annotations

import pytest

from linop.testing.jobs import missing_mpi

needs_mpi = pytest.mark.skipif(bool(missing_mpi()), reason=missing_mpi() or "MPI is there")
