"""Recommend a split of the GPUs: rates of a measured run, and an estimate of the step time of each split."""
