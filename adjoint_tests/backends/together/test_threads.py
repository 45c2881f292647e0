"""Threads of a process, looked at while others run."""

import subprocess
import sys
from pathlib import Path

import linop

PROGRAM = """
import gc, threading, time, weakref
from linop.backends.together.counted_threads import frames

gc.set_threshold(1)

class Cycle:
    def __init__(self):
        self.me = self
        weakref.finalize(self, time.sleep, 0)

end = time.monotonic() + 1

def look():
    while time.monotonic() < end:
        Cycle()
        assert threading.get_ident() in frames()

threads = [threading.Thread(target=look) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert gc.isenabled()
gc.disable()
frames()
assert not gc.isenabled()
"""


def test_looking_at_frames_while_garbage_is_collected() -> None:
    """Python 3.11 stands still here without `frames`: no thread runs any more, nor does a signal's
    handler."""
    call = [sys.executable, "-c", PROGRAM]
    subprocess.run(call, check=True, timeout=60)


def test_nothing_else_looks_at_frames() -> None:
    root = Path(linop.__file__).parent
    files = [f for f in root.rglob("*.py") if "sys._current_frames" in f.read_text()]
    assert [f.name for f in files if f.name != "counted_threads.py"] == []
