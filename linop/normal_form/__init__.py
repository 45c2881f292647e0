"""Normal form of operators: boxes, transfers, movements, local maps, stages."""
