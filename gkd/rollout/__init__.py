"""Rollout generation: vLLM engines, their Ray workers, weight receivers and the pool of engines."""
