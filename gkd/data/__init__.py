"""Prompts, sampling order, chunks of rollouts, balancing and micro-batches."""
