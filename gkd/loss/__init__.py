"""Compute the distillation loss: from hidden states or logits of the student to one number per token, and its gradient.

    reference.py          the divergences in one screen, dense and unfused; what the tests compare with
    distill_loss.py       entry point: LM head and loss together, or the loss of logits that exist already
    chunked.py            its autograd functions, one chunk of rows at a time
    vocab_parallel.py     logits split over tensor-parallel ranks -> the student's logprobs of chosen ids
    full_vocab.py         losses against a teacher's distribution over the full vocabulary
    row_kernels.py        the two passes over the logits: torch here, Triton in triton_rows.py
    token_weights.py      factors of the tokens within their sequence
    token_loss.py         tables of logprobs -> the loss and the diagnostics of each token
    text_units.py         losses against a teacher with another tokenizer; text_tables.py has its tables
    choices.py            the teacher's most probable tokens of each row, for inspection
    divergence.py         the divergences of logprobs; divergence_slopes.py has their derivatives
    policy_gradient.py    k1, k2, k3 on the sampled token, and the clipped loss of rewards

`gkd.config.loss_spec` specifies the losses of a run. Process groups are arguments.
"""
