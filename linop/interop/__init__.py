"""Operators and plans as those of other libraries: SciPy, PyLops, PyLops-MPI.

In one process an operator is SciPy's by itself (``scipy.sparse.linalg.cg(op, b)``,
``aslinearoperator(op)``, ``op.to_scipy()``); the functions here make one of the plan of a worker,
whose calls are collective. The libraries are imported when they are asked for.
"""

from linop.interop.flat_plan import scipy
from linop.interop.pylops import to_pylops
from linop.interop.pylops_mpi import (
    from_distributed_array,
    to_distributed_array,
    to_pylops_mpi,
)

__all__ = [
    "from_distributed_array",
    "scipy",
    "to_distributed_array",
    "to_pylops",
    "to_pylops_mpi",
]
