"""What is of the whole model: its state and checkpoints, tied weights, updates."""
