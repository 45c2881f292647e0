"""Renew the reports of docs/parallel_models.md: ``python docs/parallel_models/reports.py`` runs the
command on each program of ``families/``, in its wrong version, and writes ``reports/*.txt`` beside
this file. ``reports.py NAME …`` does so for some, ``my_model`` among them. Two minutes for all,
when nothing else runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

HERE = Path(__file__).resolve().parent
FOLDER = HERE / "reports"
COLUMNS = 100
"""The width of the terminal that the reports are shown on."""
AS_JSON = "sequence_norm"
"""The program whose report is shown as JSON, too."""
OWN = "my_model"
"""The file that readers copy."""


def run(program: str, folder: Path, case: str, *options: str) -> str:
    """The output of the command.

    Raises:
        RuntimeError: it fails, or finds nothing in a wrong program, or something in a right one.
    """
    command = [sys.executable, "-m", "linop", "verify", "--torch", program, *options]
    environment = os.environ | {"CASE": case}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != (1 if case == "wrong" else 0):
        raise RuntimeError(
            f"{program}, {case}: status {done.returncode}\n{done.stdout}{done.stderr}"
        )
    return done.stdout


def wrapped(text: str) -> str:
    """Lines broken as a terminal does, but between words, and indented as their first part is."""
    lines = []
    for line in text.splitlines():
        indent = " " * (len(line) - len(line.lstrip()))
        lines += textwrap.wrap(line, COLUMNS, subsequent_indent=f"{indent}  ") or [""]
    return "\n".join(lines) + "\n"


def write(name: str) -> None:
    """Renew the report of one family."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        options = ("--json", str(path)) if name == AS_JSON else ()
        text = run(f"{name}.py", HERE / "families", "wrong", *options)
        if options:
            found = json.loads(path.read_text())
            found["seconds"] = round(found["seconds"], 1)
            (FOLDER / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    head = f"$ CASE=wrong linop verify --torch {name}.py\n"
    (FOLDER / f"{name}.txt").write_text(head + wrapped(text))


def write_of_my_model() -> None:
    """Renew the reports of the file that readers copy."""
    shown = []
    for target in ("my_model.py", "my_model.py:ddp"):
        shown.append(f"$ linop verify --torch {target}\n" + wrapped(run(target, HERE, "right")))
    (FOLDER / "my_model.txt").write_text("".join(shown))


def main(names: list[str]) -> None:
    """Renew the reports of these programs; of all if none is given."""
    FOLDER.mkdir(exist_ok=True)
    for name in names or [*sorted(path.stem for path in (HERE / "families").glob("*.py")), OWN]:
        if name == OWN:
            write_of_my_model()
        else:
            write(name)
        print(name, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
