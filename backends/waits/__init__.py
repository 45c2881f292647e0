"""Waits that end, and say why: at an alarm, a deadlock or the limit; and the record of last
calls."""
