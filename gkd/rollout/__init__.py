"""Generate rollouts, in three rooms: the driver, the process of an engine, vLLM. `messages` is between them."""
