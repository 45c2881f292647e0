"""Entry point of ``python -m linop``: the command line of `linop.tools.cli`."""

from linop.tools.cli import main

main()
