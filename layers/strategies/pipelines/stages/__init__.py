"""A stage on a worker: its forwards and backwards, and the part of the backend that is its own."""
