"""Which share of the GPUs each pool should have: a run's measured rates, a simulation of the loop, a search. Pure."""
