"""The medium MPI: ranks of a communicator, their messages, collectives, waits and jobs."""
