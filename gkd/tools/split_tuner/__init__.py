"""Recommend a split of the GPUs: rates of a measured run, a simulation of the loop, a search."""
