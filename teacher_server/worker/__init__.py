"""A worker process: batches requests, runs the engine, sends replies."""
