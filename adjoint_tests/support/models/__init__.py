"""Models of other people, built from configurations without weights, under linop's strategies,
torch's own, and in one process."""
