"""The distillation loss: from the student's hidden states (or logits) to one number per token, and its gradient.

    spec.py             which losses a run trains on; no torch
    distill_loss.py     the way in: LM head and loss, chunk by chunk, or the loss of logits that exist
    vocab_parallel.py   logits split over tensor-parallel ranks -> the student's logprobs of chosen ids
    full_vocab.py       the same where the teacher's distribution is there as a whole
    row_kernels.py      the passes over the logits: torch here, Triton in triton_rows.py
    token_loss.py       tables of logprobs -> the loss of each token and what to report
    divergence.py       the divergences, written as they are defined; divergence_slopes.py their derivatives
    policy_gradient.py  k1, k2, k3 on the sampled token
    sampled_logprobs.py the student's logprob of the sampled token alone, without a loss
    reduce.py           per-token losses of all ranks -> the global token mean

Floor 1: torch, triton, and floor 0; process groups are arguments.
"""
