"""Transports: messages between workers, agreement over the control channel, waits, deadlock
detection."""
