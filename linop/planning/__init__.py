"""From stages to plans, without execution: routes, patterns, passes, lowering, cost, simulation."""
