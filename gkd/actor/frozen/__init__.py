"""Frozen models on the actor's ranks: a local teacher, which needs no server, and a reference."""
