"""Shared by the tests of schedules: a model that decides by brute force, drawn schedules."""
