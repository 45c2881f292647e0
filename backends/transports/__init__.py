"""How workers reach each other, wait, and agree."""
