"""Mutation check: plausible bugs, put into the code one at a time, which named tests must catch.

Run `python -m tests.mutants`. See `tests/mutants/__main__.py`.
"""
