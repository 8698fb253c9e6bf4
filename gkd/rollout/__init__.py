"""The student as sampler: a vLLM engine, its Ray surface, its weight receiver, the pool of engines."""
