"""``python -m linop``: the command line."""

from linop.cli import main

main()
