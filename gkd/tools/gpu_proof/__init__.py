"""Prove on a machine what only a GPU can prove: `python -m gkd.tools.gpu_proof` runs tests and benchmarks as stages."""
