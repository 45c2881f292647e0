"""The names that the pages of docs/api list, without Sphinx: tests read them, too."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path


def listed(folder: Path) -> dict[str, tuple[str, str]]:
    """The names that the pages of a folder list, each with the title and the name of its page.

    Raises:
        ValueError: a name is listed twice.
    """
    found: dict[str, tuple[str, str]] = {}
    for page in sorted(folder.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        title = text.splitlines()[0].removeprefix("# ")
        for directive in re.findall(r"(?ms)^```\{eval-rst\}$(.*?)^```$", text):
            at = re.search(r"(?m)^\.\. currentmodule:: (\S+)$", directive)
            for own in re.findall(r"(?m)^(?:   |\.\. py:data:: )(\w+)$", directive) if at else ():
                if (name := f"{at[1]}.{own}") in found:
                    raise ValueError(f"{page.name}: {name} is listed on {found[name][1]}, too")
                found[name] = title, page.stem
    return found


def file_names(names: Sequence[str]) -> dict[str, str]:
    """Names of files for those that differ from others in capitals alone, as a function and its
    class: some file systems take the two for one."""
    lower = [name.lower() for name in names]
    return {
        name: f"{name}-function"
        for name in names
        if lower.count(name.lower()) > 1 and name.rpartition(".")[2].islower()
    }
