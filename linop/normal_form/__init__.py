"""Operators as tables: boxes, transfers, movements, local maps, stages."""
