"""Sharded parameters (ZeRO stage 3): gathered for a module's forward, and again in backward."""
