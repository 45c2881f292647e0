"""State of distributed models and optimizers: gathered, scattered, saved and loaded."""
