"""Linear operators: base class and algebra, memory operators, collectives, halo exchange, padding,
offloading. Operators are built here, not run on workers: that is `backends`."""
