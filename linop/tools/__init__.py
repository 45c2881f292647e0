"""The programs that users run: the command line and its commands."""
