"""The code blocks of README and docs are tests: each file runs from its first block to its last."""

from sybil import Sybil
from sybil.parsers.myst import PythonCodeBlockParser, SkipParser

pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(), SkipParser()],
    filenames=["README.md"],
    patterns=["docs/*.md"],
).pytest()
