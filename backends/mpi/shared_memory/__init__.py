"""Messages through shared-memory windows of the ranks of one machine."""
