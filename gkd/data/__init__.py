"""Tokens in, micro-batches out: prompts, sampling order, chunks of rollouts, balancing, batching. No engine."""
