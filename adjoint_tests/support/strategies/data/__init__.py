"""Copies and shards of parameters beside one process."""
