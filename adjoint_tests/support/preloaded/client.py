"""A stand-in for ``python``: ``client.py FOLDER arguments of Python``. See the package.

It imports little, since each rank pays for it.
"""

import marshal
import os
import signal
import socket
import sys
import time

sys.path.insert(0, os.path.dirname(__file__))
from early import early

START = 200.0
"""Seconds that a server may take to start."""
FORWARDED = (
    signal.SIGABRT,
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
RANKS = "PMIX_RANK", "RANK"
"""Variables with the number of a rank: of Open MPI, and of torchrun."""


def main(folder: str, arguments: list[str]) -> None:
    rank = next((int(os.environ[name]) for name in RANKS if name in os.environ), 0)
    with open(folder + "/environment", "rb") as file:
        fits = marshal.load(file) == early(os.environ)
    if "PMI_FD" in os.environ:  # of MPICH, whose ranks inherit an open file
        fits = False
    link = connected(f"{folder}/{rank % 2}") if fits else None
    if link is None:
        os.execv(sys.executable, [sys.executable, *arguments])
    order = repr((arguments, dict(os.environ), os.getcwd())).encode()
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    socket.send_fds(link, [order], [0, 1, 2])
    process = int(link.recv(64) or b"0")
    if not process:
        raise SystemExit(f"no server: see {folder}")
    for number in FORWARDED:
        signal.signal(number, lambda number, _: os.kill(process, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    status = int(link.recv(64) or -signal.SIGKILL)  # nothing: the server was killed
    if status < 0:
        signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
        os.kill(os.getpid(), -status)
    os._exit(status)


def connected(path: str) -> socket.socket | None:
    """A connection to a server, which may have to start; None if it does not, or has ended."""
    late = time.monotonic() + START
    while time.monotonic() < late and not os.path.exists(path + ".failed"):
        link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            link.connect(path)
        except ConnectionRefusedError:  # it has died
            link.close()
            return None
        except OSError:
            link.close()
            time.sleep(0.02)
        else:
            return link
    return None


main(sys.argv[1], sys.argv[2:])
