"""Any module of torch cut in space: `linop.strategies.spatial`."""
