"""Methods for smooth functions: limited-memory BFGS, Gauss-Newton."""
