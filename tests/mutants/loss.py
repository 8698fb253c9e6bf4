"""Mutants of `gkd/loss`: signs, swapped arguments, missing factors, borders, collectives."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_FOLDER = "gkd/loss"
_GRADIENT = ("test_loss_gradient.py",)
_SLOPES = ("test_divergence_slopes.py",)
_PATHS = ("test_loss_paths.py",)
_ROWS = ("test_loss.py",)
_FUSED = ("test_loss_fused.py",)
_POLICY = ("test_policy_gradient.py",)
_TRITON = "test_triton_rows.py::"


def _mutant(name: str, old: str, new: str, tests: tuple[str, ...]) -> Mutant:
    return Mutant(f"loss_{name}", _FOLDER, old, new, tests)


# Divergences over a table of outcomes.
_DIVERGENCES = (
    _mutant(
        "forward_kl_is_reverse",
        "return _x_log_ratio(log_p, log_q).sum(dim=-1)",
        "return _x_log_ratio(log_q, log_p).sum(dim=-1)",
        _GRADIENT,
    ),
    _mutant(
        "reverse_kl_without_student_mass",
        "return _x_log_ratio(log_q, log_p).sum(dim=-1)",
        "return (log_q - log_p).sum(dim=-1)",
        _GRADIENT,
    ),
    _mutant(
        "jsd_beta_is_the_students_share",
        "_log_mixture(log_p, log_q, term.beta)",
        "_log_mixture(log_q, log_p, term.beta)",
        _GRADIENT,
    ),
    _mutant(
        "jsd_weights_swapped",
        "term.beta * teacher + (1.0 - term.beta) * student",
        "(1.0 - term.beta) * teacher + term.beta * student",
        _GRADIENT,
    ),
    _mutant(
        "skew_kl_mixes_the_wrong_share",
        "_log_mixture(log_p, log_q, term.alpha)",
        "_log_mixture(log_q, log_p, term.alpha)",
        _GRADIENT,
    ),
    _mutant(
        "skew_reverse_kl_mixes_the_wrong_share",
        "_log_mixture(log_q, log_p, term.alpha)",
        "_log_mixture(log_p, log_q, term.alpha)",
        _GRADIENT,
    ),
    _mutant(
        "renorm_of_the_student_alone",
        "return log_q.log_softmax(dim=-1), log_p.log_softmax(dim=-1)",
        "return log_q.log_softmax(dim=-1), log_p",
        _GRADIENT,
    ),
    _mutant(
        "bucket_keeps_the_rounding_of_the_wire",
        "log_q_tail[:, None]], dim=-1), log_p.log_softmax(dim=-1)",
        "log_q_tail[:, None]], dim=-1), log_p",
        ("test_loss_precision.py",),
    ),
    _mutant(
        "filling_has_student_mass", "log_q.masked_fill(~listed, -torch.inf)", "log_q", ("test_loss_properties.py",)
    ),
    _mutant(
        "empty_tail_is_an_outcome",
        "outside.masked_fill(log_q_tail == -torch.inf, -torch.inf)",
        "outside",
        ("test_loss_properties.py",),
    ),
    _mutant("zero_times_infinity", "absent = x == 0", "absent = x < 0", ("test_loss_properties.py",)),
)

# Their closed-form derivatives.
_CLOSED_FORMS = (
    _mutant(
        "slope_forward_kl_sign",
        "_parts(p, log_p, log_q).sum(dim=-1), p.neg_()",
        "_parts(p, log_p, log_q).sum(dim=-1), p",
        _SLOPES,
    ),
    _mutant("slope_reverse_kl_without_q", "parts.sum(dim=-1), parts.add_(q)", "parts.sum(dim=-1), parts", _SLOPES),
    _mutant("slope_jsd_weight", "student.mul_(1.0 - beta)", "student.mul_(beta)", _SLOPES),
    _mutant("slope_skew_reverse_kl_share", "1.0 - term.alpha * share", "1.0 - share", _SLOPES),
    _mutant("slope_zero_times_infinity", "return parts.masked_fill_(x == 0, 0.0)", "return parts", _SLOPES),
)

# The whole vocabulary.
_FULL_VOCABULARY = (
    _mutant("full_gradient_temperature", "z.add_(g[rows], alpha=1.0 / temperature)", "z.add_(g[rows])", _PATHS),
    _mutant("full_gradient_of_the_sampled_token", "g_sum + slope, norm_q", "g_sum, norm_q", _PATHS),
    _mutant("full_term_weight_in_the_gradient", "g.add_(slope, alpha=term.weight)", "g.add_(slope)", _PATHS),
    _mutant("full_overlap", "torch.minimum(log_p, log_q).exp_()", "torch.maximum(log_p, log_q).exp_()", _PATHS),
    _mutant(
        "full_sums_of_one_rank",
        "dist.all_reduce(sums, group=shard.group)",
        "sums.clone()",
        ("dist/test_loss_parallel.py::test_equals_dense",),
    ),
)

# The sampled token.
_SAMPLED = (
    _mutant("clip_in_log_space", "log_weights.clamp(max=math.log(clip))", "log_weights.clamp(max=clip)", _POLICY),
    _mutant("clip_report", "log_weights > math.log(clip)", "log_weights > clip", _POLICY),
    _mutant("k2_without_half", "log_ratio.square() / 2", "log_ratio.square()", _POLICY),
    _mutant("k3_ratio_inverted", "torch.expm1(log_ratio) - log_ratio", "torch.expm1(-log_ratio) + log_ratio", _POLICY),
    _mutant(
        "slope_without_importance_weight",
        'slope = weights * reverse_kl_estimate("k1"',
        'slope = reverse_kl_estimate("k1"',
        _POLICY,
    ),
    _mutant(
        "surrogate_value_moves",
        "slope.detach() * (actor_logprobs - actor_logprobs.detach())",
        "slope.detach() * actor_logprobs",
        _POLICY,
    ),
)

# Per-token losses and their sums.
_TOKENS = (
    _mutant("term_weight", "losses.total + term.weight * loss", "losses.total + loss", _PATHS),
    _mutant("sampled_term_weight", "losses.total + weight * loss", "losses.total + loss", ("test_reference_term.py",)),
    _mutant("sft_on_the_students_tokens", "-student_sampled, others)", "-student_sampled, targets.on_policy)", _PATHS),
    _mutant(
        "reference_weight",
        "spec.reference_weight, loss, targets.on_policy",
        "1.0, loss, targets.on_policy",
        ("test_reference_term.py",),
    ),
)

# Passes over rows of logits.
_KERNELS = (
    _mutant(
        "mean_logit_not_normalised",
        "mean[rows] = dot / total",
        "mean[rows] = dot",
        ("test_loss_precision.py::test_the_statistics_of_a_long_row",),
    ),
    _mutant(
        "gradient_temperature_at_the_ids",
        "column_grad.masked_fill(columns < 0, 0.0) / temperature",
        "column_grad.masked_fill(columns < 0, 0.0)",
        _ROWS,
    ),
    _mutant("last_piece_lost", "for start in range(0, n, step)]", "for start in range(0, n - n % step, step)]", _ROWS),
    _mutant("shortcut_overflows", "_SAFE_NORMALIZER = 50.0", "_SAFE_NORMALIZER = 500.0", _ROWS),
    _mutant("hidden_columns_not_restored", "logits.scatter_(1, index, kept)", "kept.clone()", _GRADIENT),
    _mutant(
        "triton_gradient_temperature",
        ".to(tl.float32) * inv_temperature",
        ".to(tl.float32)",
        (f"{_TRITON}test_gradient_equals_float64",),
    ),
    _mutant("triton_last_column", "mask=at < v)", "mask=at <= v)", (f"{_TRITON}test_strided_rows",)),
)

# A vocabulary split over ranks.
_VOCABULARY = (
    _mutant("first_column_of_a_shard", "(local >= 0)", "(local > 0)", _ROWS),
    _mutant("id_past_the_vocabulary", "int(ids.max()) >= self.n_valid", "int(ids.max()) > self.n_valid", _ROWS),
    _mutant("padding_has_a_gradient", "out[:, v_valid:] = 0.0", "out[:, v_valid:] *= 1.0", _ROWS),
    _mutant(
        "gradient_of_the_tail",
        "row_grad=grad_sum * rows.tail.exp() - grad_tail",
        "row_grad=grad_sum * rows.tail.exp()",
        _GRADIENT,
    ),
    _mutant("sampled_id_in_the_list", "grad[:, n_listed + i, None]", "grad[:, i, None]", _PATHS),
    _mutant(
        "normaliser_of_one_rank",
        "dist.all_reduce(message, group=shard.group)",
        "message.clone()",
        ("dist/test_vocab_parallel.py::test_equals_dense[2]",),
    ),
)

# LM head and loss together.
_HEAD = (
    _mutant(
        "head_gradient_in_bfloat16",
        "torch.zeros_like(head, dtype=statistics_dtype(head))",
        "torch.zeros_like(head)",
        _FUSED,
    ),
    _mutant("upstream_gradient_lost", "else g.mul_(grad_outputs[0])", "else g", _FUSED),
    _mutant("only_the_last_chunk", "sums += loss.chunk(logits, targets", "sums = loss.chunk(logits, targets", _PATHS),
    _mutant(
        "hidden_gradient_of_one_rank",
        "dist.all_reduce(hidden_grad, group=loss.shard.group)",
        "hidden_grad.clone()",
        ("dist/test_loss_parallel.py::test_equals_dense",),
    ),
    _mutant(
        "evaluation_keeps_its_spec",
        "self.spec, self.on_rows, self.on_choices = spec, None, None",
        "self.on_rows, self.on_choices = None, None",
        ("test_reference_term.py",),
    ),
)

# Rewards, the tail's residual, and the factors of tokens.
_REWARDS = (
    _mutant(
        "reward_limits_swapped",
        "ratio.clamp(1 - clip[0], 1 + clip[1])",
        "ratio.clamp(1 - clip[1], 1 + clip[0])",
        ("test_reward_loss.py",),
    ),
    _mutant(
        "reward_limit_moves_tokens",
        "-torch.minimum(plain, limited)",
        "-torch.maximum(plain, limited)",
        ("test_reward_loss.py",),
    ),
    _mutant(
        "teacher_reward_scale_from_the_teacher",
        "return reference + scale * (teacher_logprobs - reference)",
        "return teacher_logprobs + scale * (teacher_logprobs - reference)",
        _POLICY,
    ),
    _mutant(
        "residual_of_listed_tokens",
        "(targets.topk_ids != targets.sampled_ids[:, None]).all(dim=-1)",
        "(targets.topk_ids != targets.sampled_ids[:, None]).any(dim=-1)",
        ("test_tail_residual.py",),
    ),
    _mutant(
        "residual_in_addition_to_the_tail",
        "actor_logprobs.detach() - teacher_logprobs - tail_log_ratio",
        "actor_logprobs.detach() - teacher_logprobs",
        ("test_tail_residual.py",),
    ),
    _mutant("token_share_rounded_down", "math.ceil(Fraction(", "math.floor(Fraction(", ("test_token_weights.py",)),
    _mutant("position_of_signed_gaps", "log_ratio.abs().cumsum(0)", "log_ratio.cumsum(0)", ("test_token_weights.py",)),
)

LOSS = (
    *_DIVERGENCES,
    *_CLOSED_FORMS,
    *_FULL_VOCABULARY,
    *_SAMPLED,
    *_TOKENS,
    *_KERNELS,
    *_VOCABULARY,
    *_HEAD,
    *_REWARDS,
)
