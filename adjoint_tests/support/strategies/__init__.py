"""Programs of parallel training. Needs torch; ranks import these modules, and no test."""
