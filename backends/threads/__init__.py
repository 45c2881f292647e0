"""The medium of one process: workers that are threads, and the reference that has none."""
