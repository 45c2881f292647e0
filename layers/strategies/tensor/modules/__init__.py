"""Modules in blocks over one axis, in place of torch's."""
