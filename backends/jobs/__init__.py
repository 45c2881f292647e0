"""MPI jobs: how they start, meet and end."""
