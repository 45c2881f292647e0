"""Methods for sums of functions with proximal maps: proximal gradients, primal-dual, ADMM."""
