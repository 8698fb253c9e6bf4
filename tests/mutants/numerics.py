"""Mutants of the numerics: loss, policy gradient, normalization, context parallelism, checks of scores."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

# A mutant is three lines: name, folder and test; the text; its replacement.
_MUTANTS = r"""
# Divergences over a table of outcomes, and their closed-form derivatives.
loss_forward_kl_is_reverse gkd/loss test_loss_paths.py
return _x_log_ratio(log_p, log_q).sum(dim=-1)
return _x_log_ratio(log_q, log_p).sum(dim=-1)
loss_jsd_weights_swapped gkd/loss test_loss_paths.py
term.beta * teacher + (1.0 - term.beta) * student
(1.0 - term.beta) * teacher + term.beta * student
loss_skew_kl_mixes_the_wrong_share gkd/loss test_loss_paths.py
_log_mixture(log_p, log_q, term.alpha)
_log_mixture(log_q, log_p, term.alpha)
loss_renorm_of_the_student_alone gkd/loss test_loss_paths.py
return log_q.log_softmax(dim=-1), log_p.log_softmax(dim=-1)
return log_q.log_softmax(dim=-1), log_p
loss_empty_tail_is_an_outcome gkd/loss test_loss_properties.py
outside.masked_fill(log_q_tail == -torch.inf, -torch.inf)
outside
loss_zero_times_infinity gkd/loss test_loss_properties.py
absent = x == 0
absent = x < 0
loss_slope_forward_kl_sign gkd/loss test_divergence_slopes.py
_parts(p, log_p, log_q).sum(dim=-1), p.neg_()
_parts(p, log_p, log_q).sum(dim=-1), p
loss_slope_jsd_weight gkd/loss test_divergence_slopes.py
student.mul_(1.0 - beta)
student.mul_(beta)
# Whole vocabulary, and a vocabulary split over ranks.
loss_full_gradient_temperature gkd/loss test_loss_paths.py
z.add_(g[rows], alpha=1.0 / temperature)
z.add_(g[rows])
loss_full_sums_of_one_rank gkd/loss dist/test_loss_parallel.py::test_equals_dense
dist.all_reduce(sums, group=shard.group)
sums.clone()
loss_normaliser_of_one_rank gkd/loss dist/test_loss_parallel.py::test_equals_dense
dist.all_reduce(message, group=shard.group)
message.clone()
loss_gradient_of_the_tail gkd/loss test_loss_paths.py
row_grad=grad_sum * rows.tail.exp() - grad_tail
row_grad=grad_sum * rows.tail.exp()
loss_padding_has_a_gradient gkd/loss test_loss.py
out[:, v_valid:] = 0.0
out[:, v_valid:] *= 1.0
loss_head_gradient_in_bfloat16 gkd/loss test_loss_fused.py
torch.zeros_like(head, dtype=statistics_dtype(head))
torch.zeros_like(head)
loss_triton_gradient_temperature gkd/loss test_triton_rows.py::test_gradient_equals_float64
.to(tl.float32) * inv_temperature
.to(tl.float32)
# Policy gradient: sampled tokens, rewards, the tail's residual.
loss_clip_in_log_space gkd/loss test_policy_gradient.py
log_weights.clamp(max=math.log(clip))
log_weights.clamp(max=clip)
loss_k3_ratio_inverted gkd/loss test_policy_gradient.py
torch.expm1(log_ratio) - log_ratio
torch.expm1(-log_ratio) + log_ratio
loss_slope_without_importance_weight gkd/loss test_policy_gradient.py
slope = weights * reverse_kl_estimate("k1"
slope = reverse_kl_estimate("k1"
loss_reward_limit_moves_tokens gkd/loss test_reward_loss.py
-torch.minimum(plain, limited)
-torch.maximum(plain, limited)
loss_residual_of_listed_tokens gkd/loss test_tail_residual.py
(targets.topk_ids != targets.sampled_ids[:, None]).all(dim=-1)
(targets.topk_ids != targets.sampled_ids[:, None]).any(dim=-1)
# Weights and normalization of token losses, rows, gradients.
loss_term_weight gkd/loss test_loss_paths.py
divergences + term.weight * loss
divergences + loss
mean_over_all_tokens gkd test_reference_term.py
"] = value / n  # trackers
"] = value / sums.n_loss_tokens  # trackers
domain_mean_over_sequences gkd test_domain_loss.py
counts[[rollout.route for rollout in rollouts], 0]
counts[[rollout.route for rollout in rollouts], 1]
sequence_mean_of_one_sequence gkd test_domain_loss.py
n_tokens / (n_sequences * np.array(
n_tokens / (np.array(
loss_row_of_the_next_token gkd test_batching.py
int(start) + len(r.prompt_ids) - 1
int(start) + len(r.prompt_ids)
widened_table_has_probability_1 gkd test_batching.py
_pad_columns(t.logprobs, width, -np.inf)
_pad_columns(t.logprobs, width, 0.0)
clipping_enlarges gkd test_fsdp_checks.py
min(1.0, clip_grad / (grad_norm + 1e-6))
clip_grad / (grad_norm + 1e-6)
# Checks of a teacher's scores.
reply_about_other_tokens teacher_server test_client.py::test_swapped_replies_are_refused
if reply.token_digest != self._message.digest:
if not reply.token_digest:
token_id_twice_in_a_row teacher_server test_validate_topk.py
rows.refuse(ordered[:, 1:] == ordered[:, :-1],
rows.refuse(ordered[:, 1:] < ordered[:, :-1],
damaged_frame_passes teacher_server test_damaged_messages.py
if checksum(frame) != expected:
if not checksum(frame):
# Context parallelism: the exchange, columns and targets of a rank, sums over the ranks.
cp_no_exchange gkd dist/test_context_parallel.py
if group is not None and group.size() > 1:
if group is not None and group.size() > 9:
cp_heads_in_another_order gkd dist/test_context_parallel.py
received.movedim(0, 2).flatten(2, 3)
received.movedim(0, 3).flatten(2, 3)
cp_key_heads_repeated_in_turn gkd dist/test_context_parallel.py
tensor[:, :, None].expand(-1, -1, copies, -1, -1).flatten(1, 2)
tensor[:, None].expand(-1, copies, -1, -1, -1).flatten(1, 2)
cp_no_gradient_back gkd dist/test_context_parallel.py
_AllToAll.apply(grads[0], ctx.group), None
grads[0], None
cp_positions_from_0 gkd dist/test_context_parallel.py
F.pad(batch.position_ids, (0, missing))[:, first : first + n_own]
F.pad(batch.position_ids, (0, missing))[:, :n_own]
cp_rows_shifted gkd dist/test_context_parallel.py
indices % length - first,
(indices % length - first - 1).clamp(min=0),
cp_targets_of_the_first_rows gkd dist/test_context_parallel.py
int(rows[stop] - border) if n else 0
0
cp_sums_of_one_rank gkd dist/test_context_parallel.py
.sum(dim=0), model.groups.dp_cp)
.sum(dim=0), model.groups.dp)
cp_counts_of_each_rank gkd dist/test_context_parallel.py
self.group) / self.columns.size
self.group)
cp_rows_in_rank_order gkd dist/test_context_parallel.py
values[rows.argsort()].split(sizes)
values.split(sizes)
cp_weights_of_a_part gkd dist/test_context_parallel.py
gathered = columns.gather(local_rows)
gathered = [local_rows] * columns.size
# Images: positions on grids, features after a weight sync, digests of requests, sampled placeholders.
vision_positions_of_text teacher_server dist/test_vision_student.py
if grids is None:
if grids is not False:
vision_features_of_old_weights gkd/rollout/vllm e2e/test_vision_engine.py
if self._vision == "trained":
if self._vision == "never":
vision_placeholders_are_sampled gkd/rollout/vllm e2e/test_vision_engine.py
if vision != "none":  # a
if vision == "never":  # a
vision_digest_of_the_ids_alone teacher_server service/test_image_requests.py
digest.update(image)
digest.update(b"")
"""
_LINES = [line for line in _MUTANTS.strip().splitlines() if not line.startswith("# ")]
MUTANTS = tuple(
    Mutant(*head.split()[:2], old, new, (head.split()[2],))
    for head, old, new in zip(_LINES[::3], _LINES[1::3], _LINES[2::3], strict=True)
)
