"""Decides which batch comes next: schedulers, prefetching, streaming, replay, evaluation."""
