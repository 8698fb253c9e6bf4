"""Worker process: batch requests, run the engine, send replies."""
