"""Run one engine in a process: the Ray actor, its event loop, and the chunks that leave it."""
