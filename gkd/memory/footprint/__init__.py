"""Predict the memory of each rank of a run before anything starts. Pure: no torch, ray, megatron, transformers."""
