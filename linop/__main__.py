"""``python -m linop``: the command line."""

from linop.tools.cli import main

main()
