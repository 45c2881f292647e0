"""Forwards inside of torch.func's transforms (grad, vmap, jvp, jacrev, …): whole parameters are
gathered outside of these, as tensors that the transformed function closes over. So they are what a
plain module's parameters are to it, and torch's own graph leads from them to the shards. They are
kept until that graph is gone, as in stage 2: the transforms take no hooks of saved tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.autograd import forward_ad


@contextmanager
def untransformed() -> Iterator[None]:
    """Context outside of the transforms that this thread is in."""
    # Here: it takes the time of an import, and few programs need it.
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    # Shards have no tangents there.
    with temporarily_clear_interpreter_stack(), forward_ad._set_fwd_grad_enabled(False):
        yield
