"""Faults as data, by the part of linop that they are planted in."""
