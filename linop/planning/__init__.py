"""From stages to plans: routes, patterns, costs, passes, lowering, simulation."""
