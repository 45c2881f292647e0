"""Output of the command line: no escape codes where it is piped, or not wanted; completion."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import linop
from support.requirements import needs_mpi

ESCAPE = "\x1b"
PROGRAM = """
import linop
X = linop.TensorSpace((6,), linop.Partition((2,)))
op = linop.shift(X, 1)

def ring(workers):
    return linop.shift(linop.TensorSpace((workers,), linop.Partition((workers,))), 1)

def clumsy():
    return linop.scatter(X, linop.Partition((2,)))
"""
COMMANDS = {
    "help": ["--help"],
    "version": ["--version"],
    "help of a command": ["show", "--help"],
    "doctor": ["doctor"],
    "show": ["show", "mine:op", "--plan", "--ranks-per-machine", "1"],
    "schedule": ["show", "--schedule", "1f1b", "--stages", "2", "--micro-batches", "2"],
    "simulate": ["simulate", "mine:ring", "--workers", "100"],
    "verify": ["verify", "mine:op", "--backend", "threads", "--workers", "2"],
    "unknown operator": ["show", "nothing:there"],
    "unknown option": ["verify", "--nothing"],
    "an error of linop": ["show", "mine:clumsy"],
}
"""All but the demo, which `test_cli` runs into a pipe."""
COLOURS = {"FORCE_COLOR": "1", "GITHUB_ACTIONS": "true", "PY_COLORS": "1", "TERM": "xterm-256color"}


START = "import sys; sys.argv[0] = 'linop'; import linop.__main__"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(PROGRAM)
    return tmp_path


def command(arguments: list[str], folder: Path, env: dict[str, str], **options: Any) -> Any:
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    mine = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", *COLOURS)}
    return subprocess.run(
        [sys.executable, "-c", START, *arguments],
        cwd=folder,
        env=mine | {"PYTHONPATH": path} | env,
        check=False,
        timeout=100,
        **options,
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_a_pipe_gets_no_escape_codes(name: str, folder: Path) -> None:
    done = command(COMMANDS[name], folder, COLOURS, capture_output=True, text=True)
    assert ESCAPE not in done.stdout + done.stderr
    assert done.stdout or done.stderr
    wrong = name.startswith(("unknown", "an error"))
    assert bool(done.returncode) == wrong, done.stdout + done.stderr


@needs_mpi
@pytest.mark.timeout(120)
def test_ranks_print_none_either(folder: Path) -> None:
    """mpiexec gives ranks a terminal of its own, and passes on what they print."""
    done = command(["doctor", "--mpi"], folder, COLOURS, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert ESCAPE not in done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("slots: ")


def on_a_terminal(arguments: list[str], folder: Path, env: dict[str, str]) -> str:
    leader, follower = pty.openpty()
    options = {"stdout": follower, "stderr": follower, "stdin": subprocess.DEVNULL}
    with os.fdopen(leader, "rb", buffering=0) as screen, ThreadPoolExecutor(1) as reader:
        shown = reader.submit(_all_of, screen)
        command(arguments, folder, {"TERM": "xterm-256color"} | env, **options)
        os.close(follower)
        return shown.result()


def _all_of(screen: Any) -> str:
    shown = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while some := screen.read(65536):
            shown += some
    return shown.decode()


@pytest.mark.parametrize("name", ["simulate", "unknown option"])
def test_a_terminal_gets_none_with_no_color(name: str, folder: Path) -> None:
    assert ESCAPE in on_a_terminal(COMMANDS[name], folder, {})
    assert ESCAPE not in on_a_terminal(COMMANDS[name], folder, {"NO_COLOR": "1"})


def test_version(folder: Path) -> None:
    done = command(["--version"], folder, {}, capture_output=True, text=True)
    assert done.stdout == f"linop {linop.__version__}\n"


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("linop ", {"doctor", "show", "verify", "demo", "simulate", "explain"}),
        ("linop si", {"simulate"}),
        ("linop simulate --w", {"--workers"}),
    ],
)
def test_shells_complete_commands_and_options(typed: str, offered: set[str], folder: Path) -> None:
    words = {"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split(" ")) - 1)}
    env = {"_LINOP_COMPLETE": "complete_bash"} | words
    done = command([], folder, env, capture_output=True, text=True)
    assert set(done.stdout.split()) == offered


def test_completion_is_installed_by_an_option(folder: Path) -> None:
    env = {"_LINOP_COMPLETE": "source_bash"}
    done = command([], folder, env, capture_output=True, text=True)
    assert "complete -o default -F _linop_completion linop" in done.stdout
    shown = command(["--help"], folder, {}, capture_output=True, text=True).stdout
    assert "--install-completion" in shown
    assert "--show-completion" in shown
