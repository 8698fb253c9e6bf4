"""Engines that compute a teacher's signals: Transformers, vLLM, or one of your own, by its import path."""
