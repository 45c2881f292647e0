"""The table of docs/torch_nn.md: which layers are part of graphs of torch.compile and torch.export.
`python docs/torch_nn/graphs.py` compiles and exports all on two ranks, of one job, which takes some
minutes, and writes it into the page. What it has found is kept in a file meanwhile: started again
with the same code, it goes on."""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "torch_nn.md"
sys.path.insert(0, str(ROOT / "adjoint_tests"))

from linop.testing.workers.jobs import FailedExampleError  # noqa: E402
from support.layers.graph_examples import examples, told  # noqa: E402
from support.workers import on_ranks  # noqa: E402

FIRST, LAST = "<!-- graphs -->\n", "<!-- end of graphs -->"
AT_ONCE = 8
"""Examples of one call of the job, between lines of progress."""
CODE = "backends/autograd", "layers", "adjoint_tests/support/layers/graph_examples.py"
"""Most of the code that results depend on."""


def rows(file: Path) -> list[tuple[str, ...]]:
    """Of each example, what became of it compiled and exported.

    Args:
        file: of results, which is read first, and to which they are appended.
    """
    every, start = examples(), time.perf_counter()
    while missing := [n for n in range(len(every)) if n not in (found := _found(file))]:
        some = missing[:AT_ONCE]
        try:
            on_ranks(2, told, some, str(file), watch=60.0 * len(some))
        except FailedExampleError as error:
            if not _found(file).keys() & {*some}:  # it says nothing itself
                line = json.dumps([some[0], f"{type(error).__name__}: {error}"])
                file.write_text(file.read_text() + line + "\n")
        found = _found(file)
        took = time.perf_counter() - start
        print(f"{len(found)} of {len(every)} examples, {took:.0f} s", flush=True)
        for n in some:
            if n in found and found[n] != ["0.0e+00"] * 2:
                print(f"  {every[n].title}: {found[n]}", flush=True)
    return [(every[n].title, *map(_word, _two(found[n]))) for n in range(len(every))]


def _found(file: Path) -> dict[int, list[str]]:
    """Results by the number of an example."""
    lines = file.read_text().splitlines() if file.exists() else []
    return {number: words for number, *words in map(json.loads, lines)}


def _two(words: list[str]) -> list[str]:
    return [*words, "not reached"][:2]


def _word(line: str) -> str:
    """A result, in words."""
    if line[:1].isdigit():
        return "same bits" if float(line) == 0 else f"within {line}"
    _, _, why = line.partition("is not part of graphs: ")
    return "no: " + (why or line).split(" Hint:", maxsplit=1)[0]


def table(found: list[tuple[str, ...]]) -> str:
    """The examples that are the same in one line, the others in rows."""
    same = [title for title, *ways in found if ways == ["same bits"] * 2]
    others = [row for row in found if row[0] not in same]
    lines = [f"| {title} | {one} | {two} |" for title, one, two in others]
    return "\n".join(
        [
            f"Of {len(found)} examples {len(same)} have the bits of eager calls, compiled and "
            "exported. The others:",
            "",
            "| layer | `torch.compile(fullgraph=True)` | `torch.export` |",
            "| --- | --- | --- |",
            *lines,
        ]
    )


def page(text: str, made: str, date: str) -> str:
    """The page with a new table."""
    begin, rest = text.split(FIRST)
    begin = re.sub(r"made this part on \d+-\d+-\d+", f"made this part on {date}", begin)
    return f"{begin}{FIRST}\n{made}\n\n{LAST}{rest.split(LAST)[1]}"


def _texts(root: Path) -> Iterator[Path]:
    for name in CODE:
        place = root / name
        yield from [place] if place.is_file() else sorted(place.rglob("*.py"))


def results_file() -> Path:
    """A file for the results of this code."""
    code = hashlib.sha256(b"".join(path.read_bytes() for path in _texts(ROOT))).hexdigest()
    return Path(tempfile.gettempdir()) / f"linop-graphs-{code[:16]}.txt"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--anew", action="store_true", help="forget what was found before")
    kept = results_file()
    if parser.parse_args().anew:
        kept.unlink(missing_ok=True)
    print(f"results in {kept}", flush=True)
    made = table(rows(kept))
    today = datetime.date.today().isoformat()
    PAGE.write_text(page(PAGE.read_text(), made, today))
