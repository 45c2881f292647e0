"""Parts of a pipeline for the whole model: its state and checkpoints, tied weights, updates."""
