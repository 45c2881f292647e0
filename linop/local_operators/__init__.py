"""Local operators: linear maps inside one worker's memory, without messages.

Each is a pair of functions, the forward one and its adjoint, and the matrix if it is known. Domain
and codomain are given as a `Region` or a `Space`, on one worker; or replicated over the same
workers, all of which then compute. Input that is on other workers is moved by other operators, such
as `linop.halo_exchange`. `block`, `block_diag` and `kron` are made of others.

Those whose matrix is known, apart from `fft`, keep one rule, forward and adjoint, on every backend.
On integers they are their matrix A exactly, modulo 2^bits of the dtype. In floating point each
element of the result of x is off by at most ``2 n eps (abs(A) abs(x))``, where n is the number of
non-zero entries of its row and eps the dtype's machine epsilon (plus the smallest number of the
dtype, and unless a sum leaves its range); sums of 16-bit and shorter floats are formed in float64.
Infinities and NaN reach only those elements whose row has a non-zero entry for them. A Fourier
transform mixes all elements: its errors are relative to the norm of the whole argument, and one NaN
spreads everywhere.
"""

from linop.local_operators.blocks import block, block_diag
from linop.local_operators.fourier import fft, irfft, rfft
from linop.local_operators.functions import local
from linop.local_operators.kronecker import kron
from linop.local_operators.matrices import diagonal, matrix, restriction
from linop.local_operators.scipy_operators import from_scipy
from linop.local_operators.sliding import convolution

__all__ = [
    "block",
    "block_diag",
    "convolution",
    "diagonal",
    "fft",
    "from_scipy",
    "irfft",
    "kron",
    "local",
    "matrix",
    "restriction",
    "rfft",
]
