"""MPI jobs: starting them, joining ranks, ending ranks and backends."""
