"""Is `ghosts.backward` the adjoint of `ghosts.forward`?"""

from functools import partial

import ghosts
from hypothesis import given
from hypothesis import strategies as st

import linop


@given(n=st.integers(1, 100))
@linop.testing.spmd(workers=(1, 2, 3))
def test_backward_is_the_adjoint(comm, backend, n):
    here = partial(ghosts.forward, comm), partial(ghosts.backward, comm)
    exchange = linop.testing.pair(*here, n, n + 2, name="ghost exchange")
    linop.testing.assert_adjoint(exchange, backend)
