"""A plan as a function: steps, text, arrays, results' memory, counters, traces."""
