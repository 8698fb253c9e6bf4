"""The commands: serve, worker, status, drain, keygen."""
