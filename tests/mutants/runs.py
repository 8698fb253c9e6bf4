"""Mutants of a run: where the student's states are, its LoRA reference, the start of the pools, memory in use."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_TRAINER = "gkd"
_WITH_ADAPTERS = ("test_losses.py::test_a_mixture_trains_adapters_on_student_and_dataset_responses",)

_ACTOR_STATES = (
    Mutant(
        "host_states_are_moved",
        _TRAINER,
        "t.colocate or (needs_room and not a.fsdp_cpu_offload)",
        "t.colocate or needs_room",
        ("test_moved_states.py",),
    ),
    Mutant(
        "ignored_setting_is_not_named",
        _TRAINER,
        "if config.actor.offload_train and config.actor.fsdp_cpu_offload:",
        "if config.actor.offload_train and not config.actor.fsdp_cpu_offload:",
        ("test_moved_states.py",),
    ),
    Mutant(
        "host_states_stay_on_the_device",
        _TRAINER,
        "cpu_offload=config.actor.fsdp_cpu_offload",
        "cpu_offload=False",
        ("test_frozen_pools.py::test_states_on_the_host_stay_there",),
    ),
    Mutant(
        "reference_has_adapters",
        _TRAINER,
        "disabled_adapters(self.model) if disable_adapter else nullcontext()",
        "nullcontext()",
        ("test_fsdp_student.py::test_logprobs_of_the_reference",),
    ),
    Mutant(
        "adapters_stay_disabled",
        "gkd/actor/fsdp",
        "layer._disable_adapters = False",
        "layer._disable_adapters = True",
        ("test_fsdp_student.py::test_logprobs_without_adapters_have_no_side_effect",),
    ),
    Mutant(
        "run_without_disable_adapter",
        _TRAINER,
        '{"disable_adapter": True, "is_offload_states": False}',
        '{"is_offload_states": False}',
        _WITH_ADAPTERS,
    ),
)

_START = (
    Mutant(
        "actor_starts_after_the_engines",
        _TRAINER,
        "building = {**building, **actor.init_model(",
        'gather(building, "init_model", startup.left_s())\n    building = {**building, **actor.init_model(',
        ("test_concurrent_start.py",),
    ),
    Mutant(
        "actor_rank_without_its_gpus_in_the_log",
        "gkd/actor",
        "self._log.info(self.placement(ask_driver=False).line())",
        "self.placement(ask_driver=False).line()",
        ("test_concurrent_start.py",),
    ),
    Mutant(
        "engine_without_its_gpus_in_the_log",
        "gkd/rollout",
        "self._log.info(self.placement(ask_driver=False).line())",
        "self.placement(ask_driver=False).line()",
        ("test_concurrent_start.py",),
    ),
)

_MEMORY = (
    Mutant(
        "line_of_all_ranks_is_lost",
        "gkd/memory",
        "if rank not in (None, this_rank):",
        "if rank != this_rank:",
        ("test_memory_usage.py",),
    ),
    Mutant(
        "counts_of_the_whole_run",
        "gkd/memory",
        "before, self._before = asdict(self._before), now",
        "before = asdict(self._before)",
        ("test_allocator_counts.py",),
    ),
    Mutant(
        "counts_not_in_the_metrics",
        _TRAINER,
        "self._fragmentation.take() | self._counts.take()",
        "self._fragmentation.take()",
        ("test_allocator_counts.py",),
    ),
)

RUNS = (*_ACTOR_STATES, *_START, *_MEMORY)
