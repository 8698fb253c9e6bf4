"""Train the student on the actor's ranks: Ray workers and their pool, two backends, frozen models."""
