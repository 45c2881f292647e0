"""Arrays: those that users give, those that the executor makes and lends, and what it asks of an
array module."""
