"""Variables that are read where Python starts, or where what servers import is imported."""

_EARLY = "CUDA", "KMP", "MALLOC", "MKL", "OMP_", "OPENBLAS", "PYTHON", "TORCH"
# Of these, a fork sees to itself.
_LATE = "PYTHONFAULTHANDLER", "PYTHONPATH", "PYTHONSAFEPATH", "PYTHONUNBUFFERED"


def early(environment):  # type: ignore[no-untyped-def]  # imported by `client`, too, with little
    found = {k: v for k, v in environment.items() if k.startswith(_EARLY) and k not in _LATE}
    # Where linop may be: programs on ranks have no more of it.
    return found | {"linop": environment.get("PYTHONPATH", "").partition(":")[0]}
