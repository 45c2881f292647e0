"""Local operators: linear maps inside one worker's memory, without messages.

Each is a pair of functions, the forward one and its adjoint, and the matrix if it is known. Domain
and codomain are given as a `Region` or a `Space`, on one worker; or replicated over the same
workers, all of which then compute. Input that is on other workers is moved by other operators, such
as `linop.halo_exchange`.
"""

from linop.local_operators.fourier import fft
from linop.local_operators.functions import local
from linop.local_operators.matrices import diagonal, from_scipy, matrix, restriction
from linop.local_operators.sliding import convolution

__all__ = ["convolution", "diagonal", "fft", "from_scipy", "local", "matrix", "restriction"]
