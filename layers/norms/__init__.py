"""Normalisations of channels, last dimensions and neighbours, by statistics of the whole tensor."""
