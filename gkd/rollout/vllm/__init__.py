"""Use vLLM as one engine: start, sampling, sleep, weights and adapters that arrive, scores, timing, clean-up."""
