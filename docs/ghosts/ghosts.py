"""One ghost cell from either neighbour, by hand; and what its author takes for the adjoint."""

import numpy as np


def forward(comm, x):
    """This rank's block between the last element of the left neighbour's and the first of the
    right one's; zero at both ends."""
    left, right = comm.rank - 1, comm.rank + 1
    y = np.zeros(x.size + 2)
    y[1:-1] = x
    if left >= 0:
        comm.Sendrecv(x[:1], left, recvbuf=y[:1], source=left)
    if right < comm.size:
        comm.Sendrecv(x[-1:], right, recvbuf=y[-1:], source=right)
    return y


def backward(comm, y):
    """Ghost cells go back to where they came from."""
    left, right = comm.rank - 1, comm.rank + 1
    x = y[1:-1].copy()
    if left >= 0:
        comm.Sendrecv(y[:1], left, recvbuf=x[:1], source=left)
    if right < comm.size:
        comm.Sendrecv(y[-1:], right, recvbuf=x[-1:], source=right)
    return x
