"""Mutants of the numerics: loss, policy gradient, normalization, context parallelism, checks of scores."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = (
    # Divergences over a table of outcomes, and their closed-form derivatives.
    Mutant(
        "loss_forward_kl_is_reverse",
        "gkd/loss",
        "return _x_log_ratio(log_p, log_q).sum(dim=-1)",
        "return _x_log_ratio(log_q, log_p).sum(dim=-1)",
        ("test_loss_gradient.py",),
    ),
    Mutant(
        "loss_jsd_weights_swapped",
        "gkd/loss",
        "term.beta * teacher + (1.0 - term.beta) * student",
        "(1.0 - term.beta) * teacher + term.beta * student",
        ("test_loss_gradient.py",),
    ),
    Mutant(
        "loss_skew_kl_mixes_the_wrong_share",
        "gkd/loss",
        "_log_mixture(log_p, log_q, term.alpha)",
        "_log_mixture(log_q, log_p, term.alpha)",
        ("test_loss_gradient.py",),
    ),
    Mutant(
        "loss_renorm_of_the_student_alone",
        "gkd/loss",
        "return log_q.log_softmax(dim=-1), log_p.log_softmax(dim=-1)",
        "return log_q.log_softmax(dim=-1), log_p",
        ("test_loss_gradient.py",),
    ),
    Mutant(
        "loss_empty_tail_is_an_outcome",
        "gkd/loss",
        "outside.masked_fill(log_q_tail == -torch.inf, -torch.inf)",
        "outside",
        ("test_loss_properties.py",),
    ),
    Mutant("loss_zero_times_infinity", "gkd/loss", "absent = x == 0", "absent = x < 0", ("test_loss_properties.py",)),
    Mutant(
        "loss_slope_forward_kl_sign",
        "gkd/loss",
        "_parts(p, log_p, log_q).sum(dim=-1), p.neg_()",
        "_parts(p, log_p, log_q).sum(dim=-1), p",
        ("test_divergence_slopes.py",),
    ),
    Mutant(
        "loss_slope_jsd_weight",
        "gkd/loss",
        "student.mul_(1.0 - beta)",
        "student.mul_(beta)",
        ("test_divergence_slopes.py",),
    ),
    # Whole vocabulary, and a vocabulary split over ranks.
    Mutant(
        "loss_full_gradient_temperature",
        "gkd/loss",
        "z.add_(g[rows], alpha=1.0 / temperature)",
        "z.add_(g[rows])",
        ("test_loss_paths.py",),
    ),
    Mutant(
        "loss_full_sums_of_one_rank",
        "gkd/loss",
        "dist.all_reduce(sums, group=shard.group)",
        "sums.clone()",
        ("dist/test_loss_parallel.py::test_equals_dense",),
    ),
    Mutant(
        "loss_normaliser_of_one_rank",
        "gkd/loss",
        "dist.all_reduce(message, group=shard.group)",
        "message.clone()",
        ("dist/test_loss_parallel.py::test_equals_dense",),
    ),
    Mutant(
        "loss_gradient_of_the_tail",
        "gkd/loss",
        "row_grad=grad_sum * rows.tail.exp() - grad_tail",
        "row_grad=grad_sum * rows.tail.exp()",
        ("test_loss_gradient.py",),
    ),
    Mutant(
        "loss_padding_has_a_gradient",
        "gkd/loss",
        "out[:, v_valid:] = 0.0",
        "out[:, v_valid:] *= 1.0",
        ("test_loss.py",),
    ),
    Mutant(
        "loss_head_gradient_in_bfloat16",
        "gkd/loss",
        "torch.zeros_like(head, dtype=statistics_dtype(head))",
        "torch.zeros_like(head)",
        ("test_loss_fused.py",),
    ),
    Mutant(
        "loss_triton_gradient_temperature",
        "gkd/loss",
        ".to(tl.float32) * inv_temperature",
        ".to(tl.float32)",
        ("test_triton_rows.py::test_gradient_equals_float64",),
    ),
    # Policy gradient: sampled tokens, rewards, the tail's residual.
    Mutant(
        "loss_clip_in_log_space",
        "gkd/loss",
        "log_weights.clamp(max=math.log(clip))",
        "log_weights.clamp(max=clip)",
        ("test_policy_gradient.py",),
    ),
    Mutant(
        "loss_k3_ratio_inverted",
        "gkd/loss",
        "torch.expm1(log_ratio) - log_ratio",
        "torch.expm1(-log_ratio) + log_ratio",
        ("test_policy_gradient.py",),
    ),
    Mutant(
        "loss_slope_without_importance_weight",
        "gkd/loss",
        'slope = weights * reverse_kl_estimate("k1"',
        'slope = reverse_kl_estimate("k1"',
        ("test_policy_gradient.py",),
    ),
    Mutant(
        "loss_reward_limit_moves_tokens",
        "gkd/loss",
        "-torch.minimum(plain, limited)",
        "-torch.maximum(plain, limited)",
        ("test_reward_loss.py",),
    ),
    Mutant(
        "loss_residual_of_listed_tokens",
        "gkd/loss",
        "(targets.topk_ids != targets.sampled_ids[:, None]).all(dim=-1)",
        "(targets.topk_ids != targets.sampled_ids[:, None]).any(dim=-1)",
        ("test_tail_residual.py",),
    ),
    # Weights and normalization of token losses, rows, gradients.
    Mutant(
        "loss_term_weight",
        "gkd/loss",
        "divergences + term.weight * loss",
        "divergences + loss",
        ("test_loss_paths.py",),
    ),
    Mutant(
        "mean_over_all_tokens",
        "gkd",
        '"] = value / n  # trackers',
        '"] = value / sums.n_loss_tokens  # trackers',
        ("test_reference_term.py",),
    ),
    Mutant(
        "domain_mean_over_sequences",
        "gkd",
        "counts[[rollout.route for rollout in rollouts], 0]",
        "counts[[rollout.route for rollout in rollouts], 1]",
        ("test_domain_loss.py",),
    ),
    Mutant(
        "sequence_mean_of_one_sequence",
        "gkd",
        "n_tokens / (n_sequences * np.array(",
        "n_tokens / (np.array(",
        ("test_domain_loss.py",),
    ),
    Mutant(
        "loss_row_of_the_next_token",
        "gkd",
        "int(start) + len(r.prompt_ids) - 1",
        "int(start) + len(r.prompt_ids)",
        ("test_batching.py",),
    ),
    Mutant(
        "widened_table_has_probability_1",
        "gkd",
        "_pad_columns(t.logprobs, width, -np.inf)",
        "_pad_columns(t.logprobs, width, 0.0)",
        ("test_batching.py",),
    ),
    Mutant(
        "clipping_enlarges",
        "gkd",
        "min(1.0, clip_grad / (grad_norm + 1e-6))",
        "clip_grad / (grad_norm + 1e-6)",
        ("test_fsdp_checks.py",),
    ),
    # Checks of a teacher's scores.
    Mutant(
        "reply_about_other_tokens",
        "teacher_server",
        "if reply.token_digest != self._message.digest:",
        "if not reply.token_digest:",
        ("test_client.py::test_swapped_replies_are_refused",),
    ),
    Mutant(
        "token_id_twice_in_a_row",
        "teacher_server",
        "rows.refuse(ordered[:, 1:] == ordered[:, :-1],",
        "rows.refuse(ordered[:, 1:] < ordered[:, :-1],",
        ("test_validate_topk.py",),
    ),
    Mutant(
        "damaged_frame_passes",
        "teacher_server",
        "if checksum(frame) != expected:",
        "if not checksum(frame):",
        ("test_damaged_messages.py",),
    ),
    # Context parallelism: the exchange, columns and targets of a rank, sums over the ranks.
    *(
        Mutant(f"cp_{name}", "gkd", old, new, ("dist/test_context_parallel.py",))
        for name, old, new in (
            ("no_exchange", "if group is not None and group.size() > 1:", "if group is not None and group.size() > 9:"),
            ("heads_in_another_order", "received.movedim(0, 2).flatten(2, 3)", "received.movedim(0, 3).flatten(2, 3)"),
            (
                "key_heads_repeated_in_turn",
                "tensor[:, :, None].expand(-1, -1, copies, -1, -1).flatten(1, 2)",
                "tensor[:, None].expand(-1, copies, -1, -1, -1).flatten(1, 2)",
            ),
            ("no_gradient_back", "_AllToAll.apply(grads[0], ctx.group), None", "grads[0], None"),
            (
                "positions_from_0",
                "F.pad(batch.position_ids, (0, missing))[:, first : first + n_own]",
                "F.pad(batch.position_ids, (0, missing))[:, :n_own]",
            ),
            ("rows_shifted", "indices % length - first,", "(indices % length - first - 1).clamp(min=0),"),
            ("targets_of_the_first_rows", "int(rows[stop] - border) if n else 0", "0"),
            ("sums_of_one_rank", ".sum(dim=0), model.groups.dp_cp)", ".sum(dim=0), model.groups.dp)"),
            ("counts_of_each_rank", "self.group) / self.columns.size", "self.group)"),
            ("rows_in_rank_order", "values[rows.argsort()].split(sizes)", "values.split(sizes)"),
            ("weights_of_a_part", "gathered = columns.gather(local_rows)", "gathered = [local_rows] * columns.size"),
        )
    ),
    # Images: positions on grids, features after a weight sync, digests of requests, sampled placeholders.
    Mutant(
        "vision_positions_of_text",
        "teacher_server",
        "if grids is None:",
        "if grids is not False:",
        ("dist/test_vision_student.py",),
    ),
    *(
        Mutant(f"vision_{name}", "gkd/rollout/vllm", old, new, ("e2e/test_vision_engine.py",))
        for name, old, new in (
            ("features_of_old_weights", 'if self._vision == "trained":', 'if self._vision == "never":'),
            ("placeholders_are_sampled", 'if vision != "none":  # a', 'if vision == "never":  # a'),
        )
    ),
    Mutant(
        "vision_digest_of_the_ids_alone",
        "teacher_server",
        "digest.update(image)",
        'digest.update(b"")',
        ("service/test_image_requests.py",),
    ),
)
