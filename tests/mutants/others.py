"""Mutants of everything but the loss: schedulers, weight sync, client, broker, checkpoints, footprint, config."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_TRAINER, _SERVER = "gkd", "teacher_server"

_BATCHES = (
    Mutant(
        "stream_due_one_step_late",
        _TRAINER,
        "newest_due = last - self._max_staleness\n",
        "newest_due = last - self._max_staleness - 1\n",
        ("test_staleness.py",),
    ),
    Mutant(
        "stream_begins_one_batch_too_many",
        _TRAINER,
        "version + self._max_staleness + 1, self._total_steps",
        "version + self._max_staleness + 2, self._total_steps",
        ("test_staleness.py",),
    ),
    Mutant(
        "early_parts_of_any_size",
        _TRAINER,
        "math.ceil(size / 2) if self._early_parts",
        "1 if self._early_parts",
        ("test_staleness.py",),
    ),
    Mutant(
        "partly_answered_prompts_are_not_started",
        _TRAINER,
        " if prompt.is_unanswered]",
        "]",
        ("test_prompt_queue.py",),
    ),
    Mutant("scheduler_bound", _TRAINER, '"two_step_off": 2', '"two_step_off": 1', ("test_staleness.py",)),
    Mutant(
        "staleness_check_off_by_one",
        _TRAINER,
        "step - oldest > bound",
        "step - oldest > bound + 1",
        ("test_trainer.py",),
    ),
    Mutant(
        "batches_share_a_seed",
        _TRAINER,
        "seed=seed + number",
        "seed=seed",
        ("test_prefetch.py",),
    ),
    Mutant("replay_of_the_step_before", _TRAINER, "step_folder(step + 1)", "step_folder(step)", ("test_replay.py",)),
    Mutant(
        "epochs_in_one_order",
        _TRAINER,
        "np.random.default_rng([self._seed, epoch])",
        "np.random.default_rng([self._seed])",
        ("test_sampler.py",),
    ),
    Mutant(
        "share_of_each_step_rounded",
        _TRAINER,
        "int((step + 1) * each) - int(step * each)",
        "int(each)",
        ("test_mixing.py",),
    ),
    Mutant(
        "balance_moves_the_whole_gap", _TRAINER, "heavy.nearest(gap / 2)", "heavy.nearest(gap)", ("test_balance.py",)
    ),
    Mutant(
        "loss_row_of_the_next_token",
        _TRAINER,
        "int(start) + len(r.prompt_ids) - 1",
        "int(start) + len(r.prompt_ids)",
        ("test_batching.py",),
    ),
    Mutant(
        "packed_rows_of_the_next_sequence",
        _TRAINER,
        "_loss_index(rollouts, borders[:-1])",
        "_loss_index(rollouts, borders[1:])",
        ("test_batching.py",),
    ),
    Mutant(
        "widened_table_has_probability_1",
        _TRAINER,
        "_pad_columns(t.topk_logprobs, width, -np.inf)",
        "_pad_columns(t.topk_logprobs, width, 0.0)",
        ("test_batching.py",),
    ),
    Mutant(
        "budget_counts_one_sequence_less",
        _TRAINER,
        "* (len(groups[-1]) + 1) <= max_tokens",
        "* len(groups[-1]) <= max_tokens",
        ("test_batching.py",),
    ),
    Mutant(
        "mean_over_all_tokens",
        _TRAINER,
        '"] = value / n  # trackers',
        '"] = value / sums.n_loss_tokens  # trackers',
        ("test_reference_term.py",),
    ),
)

_WEIGHTS = (
    Mutant(
        "bucket_offsets_unaligned",
        _TRAINER,
        "-(-end // _ALIGN_BYTES) * _ALIGN_BYTES",
        "end",
        ("test_buckets.py",),
    ),
    Mutant("digest_without_shape", _TRAINER, "xxhash.xxh3_128(header)", "xxhash.xxh3_128()", ("test_buckets.py",)),
    Mutant(
        "missing_tensor_is_equal",
        "gkd/weight_sync",
        ".keys() | ",
        ".keys() & ",
        ("test_buckets.py", "test_coordinator.py"),
    ),
    Mutant("first_sync_alone_verified", _TRAINER, "self._n_pushed < 2", "self._n_pushed < 1", ("test_coordinator.py",)),
    Mutant("engines_share_a_rank", _TRAINER, "spec(1 + place * tp)", "spec(1 + place)", ("test_coordinator.py",)),
)

_OPTIMIZER = (
    Mutant(
        "warmup_begins_at_0",
        _TRAINER,
        "self.lr * (step + 1) / self.warmup_steps",
        "self.lr * step / self.warmup_steps",
        ("test_megatron_platform.py",),
    ),
    Mutant(
        "decay_ends_below_the_floor",
        _TRAINER,
        "self.min_lr_ratio + (1.0 - self.min_lr_ratio) * remaining",
        "(1.0 - self.min_lr_ratio) * remaining",
        ("test_megatron_platform.py",),
    ),
    Mutant(
        "norms_decay",
        _TRAINER,
        '[p for p in trained if p.ndim <= 1], "weight_decay": 0.0',
        '[p for p in trained if p.ndim <= 1], "weight_decay": spec.weight_decay',
        ("test_fsdp_checks.py::test_adamw_is_torchs_own",),
    ),
    Mutant(
        "clipping_enlarges",
        _TRAINER,
        "min(1.0, clip_grad / (grad_norm + 1e-6))",
        "clip_grad / (grad_norm + 1e-6)",
        ("test_fsdp_checks.py",),
    ),
)

_CLIENT = (
    Mutant(
        "reply_about_other_tokens",
        _TRAINER,
        "if reply.token_digest != self._digest:",
        "if not reply.token_digest:",
        ("test_client.py::test_swapped_replies_are_refused",),
    ),
    Mutant(
        "another_model_is_accepted",
        _TRAINER,
        "if self._fingerprint and fingerprint != self._fingerprint:",
        "if self._fingerprint and not fingerprint:",
        ("test_client.py::test_another_model_on_the_same_address_ends_the_run",),
    ),
    Mutant(
        "mass_target_missed",
        _TRAINER,
        "1 - table.tail_mass < ",
        "1 + table.tail_mass < ",
        ("test_client.py::test_a_missed_mass_target_is_an_error",),
    ),
    Mutant(
        "window_has_one_more",
        _TRAINER,
        "self._n_in_flight - self._n_in_window if",
        "self._n_in_flight - self._n_in_window + 1 if",
        ("test_client_futures.py::test_requests_above_the_window_wait_in_the_client",),
    ),
    Mutant(
        "token_id_twice_in_a_row",
        _TRAINER,
        "ordered[:, 1:] == ordered[:, :-1]",
        "ordered[:, 1:] < ordered[:, :-1]",
        ("test_validate_topk.py",),
    ),
)

_BROKER = (
    Mutant(
        "credit_ignores_the_new_job",
        _SERVER,
        "self.n_tokens + n_tokens <= self.hello.credit_tokens",
        "self.n_tokens <= self.hello.credit_tokens",
        ("test_request_queue.py",),
    ),
    Mutant(
        "lost_work_goes_last",
        _SERVER,
        "self._enqueue(job, first=True)",
        "self._enqueue(job, first=False)",
        ("test_request_queue.py",),
    ),
    Mutant(
        "retry_where_it_failed_before",
        _SERVER,
        "others - job.failed_workers - {failed_on}",
        "others - {failed_on}",
        ("test_request_queue.py",),
    ),
    Mutant(
        "reconnection_is_blamed",
        _SERVER,
        "job.attempts -= not blame",
        "job.attempts -= blame",
        ("test_request_queue.py",),
    ),
    Mutant(
        "stream_ends_with_another_beginning",
        _SERVER,
        "if job is None or (job.is_stream and job.worker != worker):",
        "if job is None:",
        ("test_request_queue.py",),
    ),
    Mutant(
        "reply_of_another_request_passes",
        _SERVER,
        '_same("token_digest", reply.token_digest, job.digest)',
        '_same("token_digest", job.digest, job.digest)',
        ("test_broker.py::test_a_worker_that_sends_bad_data_is_excluded",),
    ),
    Mutant(
        "hole_in_a_stream_passes",
        _SERVER,
        '_same("start", reply.start, job.n_rows)',
        '_same("start", reply.start, reply.start)',
        ("test_broker.py::test_a_stream_with_a_gap_excludes_its_worker",),
    ),
    Mutant(
        "damaged_frame_passes",
        _SERVER,
        "if checksum(frame) != expected:",
        "if not checksum(frame):",
        ("test_payload.py",),
    ),
    Mutant(
        "batch_over_the_token_budget",
        _SERVER,
        "(len(batch) + 1) * longest_with <= max_batch_tokens",
        "len(batch) * longest_with <= max_batch_tokens",
        ("test_token_budget.py",),
    ),
)

_CHECKPOINTS = (
    Mutant(
        "digest_not_compared",
        _TRAINER,
        "same = digest_file(folder / name) == manifest.files[name]",
        "same = digest_file(folder / name).n_bytes == manifest.files[name].n_bytes",
        ("test_checkpoints.py::test_a_damaged_checkpoint_falls_back_to_the_previous_one",),
    ),
    Mutant(
        "seal_not_compared",
        _TRAINER,
        "if seal != _seal(content):",
        "if not seal:",
        ("test_checkpoints.py::test_every_flipped_bit_of_the_manifest_is_detected",),
    ),
    Mutant(
        "manifest_leads_out_of_its_folder",
        _TRAINER,
        'if path.is_absolute() or ".." in path.parts:',
        "if path.is_absolute():",
        ("test_checkpoints.py::test_a_manifest_cannot_list_files_outside_its_folder",),
    ),
    Mutant(
        "step_committed_twice",
        _TRAINER,
        "newest is not None and newest >= step",
        "newest is not None and newest > step",
        ("test_checkpoints.py::test_a_commit_needs_a_begun_save_of_a_newer_step",),
    ),
    Mutant(
        "one_checkpoint_too_many_deleted",
        _TRAINER,
        "committed[:-keep_last]",
        "committed[: 1 - keep_last]",
        ("test_checkpoints.py::test_retention",),
    ),
    Mutant(
        "names_not_flushed",
        _TRAINER,
        "fsync(folder)",
        "folder.stat()",
        ("test_checkpoints.py::test_a_commit_flushes_files_before_the_rename",),
    ),
    Mutant(
        "another_teacher_may_resume",
        _TRAINER,
        'if fingerprint == new["fingerprint"]:',
        'if new["fingerprint"]:',
        ("test_run_folder.py::test_a_folder_of_another_run_is_refused_or_resumed",),
    ),
    Mutant(
        "schedule_may_be_cut_short",
        _TRAINER,
        'now.actor.optim.schedule == "constant"',
        "now.actor.optim.schedule",
        ("test_run_folder.py::test_total_steps_may_change_only_if_the_schedule_allows_it",),
    ),
)

_FOOTPRINT = (
    Mutant(
        "no_float32_masters",
        _TRAINER,
        "_FLOAT32 * owned * (2 if b == _FLOAT32 or adapters else 3)",
        "_FLOAT32 * owned * 2",
        ("unit/test_footprint.py::test_state_is_what_this_project_keeps",),
    ),
    Mutant("tied_embedding_twice", _TRAINER, "(1 if self.tied", "(2 if self.tied", ("unit/test_footprint.py",)),
    Mutant(
        "interleaved_stage_keeps_half",
        _TRAINER,
        "(pp - stage.number - 1) * 2 + (vpp - 1) * pp + 1",
        "(pp - stage.number - 1) + (vpp - 1) * pp + 1",
        ("test_footprint_numbers.py",),
    ),
    Mutant(
        "keys_without_values",
        _TRAINER,
        "return 2 * dims.n_layers * heads",
        "return dims.n_layers * heads",
        ("unit/test_footprint.py", "test_footprint_numbers.py"),
    ),
)

_CONFIG = (
    Mutant("pipeline_ranks_forgotten", _TRAINER, "if world % (a.tp * a.pp):", "if world % a.tp:", ("test_config.py",)),
    Mutant(
        "stage_ends_with_the_outage",
        _TRAINER,
        "t.stage_timeout_s <= patience",
        "t.stage_timeout_s < patience",
        ("test_config.py",),
    ),
    Mutant(
        "budget_of_one_sequence_refused",
        _TRAINER,
        "if 0 < budget < longest:",
        "if 0 < budget <= longest:",
        ("test_config.py",),
    ),
    Mutant(
        "nan_is_in_range",
        _SERVER,  # where the trainer's keys are declared, too
        "value > self.gt",
        "not value <= self.gt",
        ("test_config.py",),
    ),
)

_SUPERVISION = (
    Mutant(
        "domain_mean_over_sequences",
        _TRAINER,
        "counts[[rollout.route for rollout in rollouts], 0]",
        "counts[[rollout.route for rollout in rollouts], 1]",
        ("test_domain_loss.py",),
    ),
    Mutant(
        "sequence_mean_of_one_sequence",
        _TRAINER,
        "n_tokens / (n_sequences * np.array(",
        "n_tokens / (np.array(",
        ("test_domain_loss.py",),
    ),
    Mutant(
        "given_ids_listed_twice",
        _SERVER,
        "logits.scatter_(1, given, -torch.inf)",
        "logits.clone()",
        ("unit/test_given_ids.py",),
    ),
    Mutant(
        "sampled_beside_the_list_at_temperature_1",
        _SERVER,
        "(own - top).div_(params.temperature)[:, 0].sub_(total.log())",
        "(own - top)[:, 0].sub_(total.log())",
        ("unit/test_given_ids.py",),
    ),
    Mutant(
        "template_loses_the_history",
        _TRAINER,
        '(*prompt.messages[:-1], {**last, "content": text}) if last',
        '({**last, "content": text},) if last',
        ("test_teacher_prompt.py",),
    ),
    Mutant(
        "teacher_scores_after_the_students_prompt",
        _TRAINER,
        "replace(self, prompt_ids=self.teacher_ids)",
        "replace(self)",
        ("test_teacher_prompt.py",),
    ),
    Mutant(
        "failed_comparison_is_wrong",
        _TRAINER,
        "timeout_seconds=_MATH_S, raise_on_error=True",
        "timeout_seconds=_MATH_S",
        ("test_reward_workers.py::test_math_verify_hides_no_failed_comparison",),
    ),
)

OTHERS = (*_BATCHES, *_WEIGHTS, *_OPTIMIZER, *_CLIENT, *_BROKER, *_CHECKPOINTS, *_FOOTPRINT, *_CONFIG, *_SUPERVISION)
