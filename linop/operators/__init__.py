"""The algebra: the operator class, memory operators, collectives, halos, local operators."""
