"""The distillation loss: from the student's (vocabulary-parallel) logits to one number per token.

    vocab_parallel.py   logits -> the student's logprobs of the teacher's top-k ids
    divergence.py       two [N, K] tables of logprobs -> one loss a token
    reduce.py           per-token losses of all ranks -> the global token mean
    spec.py             which of it a run uses

Floor 1: torch and the shared types only; process groups are arguments.
"""
