"""The linop of each rank, compared before ranks exchange anything else: other sources may choose
other messages, or pickle other ones. Its own messages are bytes in a format that does not change.

Versions of Python and NumPy, and variables of the environment, may differ between ranks.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from linop.errors import BackendError
from linop.planning.patterns import spans

WORDS = 256
"""Bytes of the text of a build, padded with spaces."""


def folders() -> list[Path]:
    """Folders of the package's sources."""
    specs = [find_spec(name) for name in ("linop", "linop.backends", "linop.layers")]
    return [Path(at) for one in specs if one for at in one.submodule_search_locations or ()]


@cache
def digest() -> bytes:
    """16 bytes: equal on ranks of equal sources and byte order, whatever the folders are called;
    read in about 5 ms."""
    files = {file for folder in folders() for file in folder.rglob("*.py")}
    each = sorted(hashlib.sha256(file.read_bytes()).digest() for file in files)
    return hashlib.sha256(b"".join([*each, sys.byteorder.encode()])).digest()[:16]


def words() -> bytes:
    """The build in words."""
    version = getattr(sys.modules["linop"], "__version__", "?")
    text = f"{version} of sources {digest().hex()[:8]}, {sys.byteorder}-endian, in {folders()[0]}"
    return text.encode()[:WORDS].ljust(WORDS)


def check(gathered: Callable[[bytes], Sequence[bytes]]) -> None:
    """Check that all ranks have the same linop; collective.

    Args:
        gathered: all-gather of bytes, of the same number on all ranks.

    Raises:
        BackendError: they have not; on every rank, with the same text.
    """
    digests = gathered(digest())
    if len(set(digests)) == 1:
        return
    said = gathered(words())
    each = []
    for known in dict.fromkeys(digests):
        workers = tuple(w for w, one in enumerate(digests) if one == known)
        where = f"worker{'s' if len(workers) > 1 else ''} {spans(workers)}"
        each.append(f"{where}: {said[workers[0]].decode(errors='replace').rstrip()}")
    raise BackendError(
        f"workers have different versions of linop, or different sources of it: {'; '.join(each)}. "
        f"Install the same linop on every machine"
    )
