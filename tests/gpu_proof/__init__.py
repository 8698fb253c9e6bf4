"""Prove on a machine what only a GPU can prove: `python -m tests.gpu_proof` runs tests and benchmarks as stages."""
