"""Start a run: reserve the pools, start the processes, connect the roles."""
