"""Transports: messages between workers, and their agreement over the control channel. Deadlocks and
the ends of waits are in `linop.backends.waits`; those of threads in `mailboxes`."""
