"""Commands of the teacher server: serve, worker, status, drain, keygen, http."""
