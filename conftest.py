"""The code blocks of README and docs are tests: each file runs from its first block to its last."""

from importlib.util import find_spec

from sybil import Sybil
from sybil.parsers.myst import PythonCodeBlockParser, SkipParser

pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(), SkipParser()],
    filenames=["README.md"],
    patterns=["docs/*.md", "docs/coming_from/*.md", "docs/api/*.md"],
    setup=lambda names: names.update(
        lacks_torch=find_spec("torch") is None,
        lacks_models=not all(map(find_spec, ("torch", "torchvision", "transformers"))),
    ),
).pytest()
