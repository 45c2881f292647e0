"""States of distributed models: gathered, scattered, on disk."""
