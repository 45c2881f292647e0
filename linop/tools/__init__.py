"""The command line ``linop``, and the work of its commands that no other package needs."""
