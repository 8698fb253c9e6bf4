"""Engines that compute a teacher's signals: Transformers, vLLM, and a trivial one for load tests."""
