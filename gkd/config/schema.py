"""All settings of a run, and what follows from them: pool sizes, loss, teacher signals, held models.

`gkd.config.load` reads the settings from YAML and `key=value` overrides, `gkd.config.check` checks them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import cast

from gkd.config.declare import is_path
from gkd.config.loss_spec import REWARD, LossSpec, loss_spec, teacher_signals
from gkd.config.schedule import LOSSES, OF_ROLLOUTS, REWARD_WEIGHT, value_at
from gkd.config.schema_rollout import AUTO, GLOO, IPC, NCCL, has_expandable_segments
from gkd.config.schema_sections import EXACT_MATCH, NO_METRIC, Sections, Vision
from gkd.config.schema_teacher import ACTOR, BY_UNITS, GROUP_KEYS, ROLLOUT, SOLVED_SIBLING, RouteConfig, TeacherConfig
from gkd.errors import ConfigError
from teacher_server.wire.protocol import Signal

NUMBERED_TURNS = 8  # turns with metrics of their own
_INHERITED = tuple(item.name for item in fields(RouteConfig) if item.name != "weight")  # keys of a route's teacher
ENGINE_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # vLLM's choices of max_lora_rank


@dataclass(frozen=True, slots=True)
class Route:
    """One teacher: an entry of `teacher.routes`, or the only one, without a name.

    A row of the data names its route in the column `data.teacher_key`. A `Prompt` and its rollouts carry its index.

    Args:
        name: key in `teacher.routes`; empty means the only teacher of the run.
        teacher: the section `teacher` with what the route sets itself.
        weight: factor of the loss of its tokens.
        own: keys that the route sets itself.
    """

    name: str
    teacher: TeacherConfig
    weight: float = 1.0
    own: frozenset[str] = frozenset()

    def key(self, name: str) -> str:
        """Return the dotted key that a value of `teacher` comes from."""
        return f"teacher.routes.{self.name}.{name}" if name in self.own else f"teacher.{name}"

    def error(self, name: str, problem: str, fix: str) -> ConfigError:
        """Return the error of a key of `teacher`, with its value."""
        return ConfigError(self.key(name), getattr(self.teacher, name), problem, fix)

    @property
    def label(self) -> str:
        """Return the route for a message, like `teacher.routes.math`; `teacher` for the only one."""
        return f"teacher.routes.{self.name}" if self.name else "teacher"


@dataclass(frozen=True, slots=True, kw_only=True)
class Derived:
    """Facts that follow from the settings of a run."""

    loss: LossSpec
    routes: tuple[Route, ...]  # the teachers; at least one
    signals: tuple[Signal, ...]  # requested from the teacher for each sequence
    n_student_ids: int  # per response token, the student's most probable ids that the engines hand to the teacher
    max_sequence_length: int  # tokens of prompt and response
    max_teacher_length: int  # tokens of the teacher's prompt, which may be longer, and response
    max_engine_length: int  # tokens of a sequence in the rollout engines; if they are the teacher, with one to generate
    world_size: int  # actor ranks, on all nodes
    dp_size: int  # data-parallel groups of the actor
    n_shards: int  # ranks that share the optimizer states of the same weights: data- and context-parallel ones
    n_engines: int  # vLLM engines, on all nodes
    n_gpus: int  # GPUs of both pools, on all nodes; colocated ones count once
    teacher_pool: str  # pool whose processes score, see `TeacherBackend`; empty: a teacher outside of the run
    reference_is_actor: bool  # the reference is the actor with its adapters disabled
    reference_folder: str  # frozen reference model on the actor's ranks; empty if there is no second model
    engine_adapter_rank: int  # largest rank of adapters that the engines hold; 0: they hold merged weights
    moves_states: bool  # the actor's states are in host memory between two calls
    early_parts: bool  # a step can train on a part of its batch before it has the rest
    rewards: tuple[str, ...]  # functions of reward.functions, which judge training responses
    groups: tuple[tuple[str, str], ...]  # (key, path) of the functions that get all responses to a prompt of training
    vision: Vision  # what becomes of the student's vision tower
    metrics: tuple[str, ...]  # functions in processes of their own that judge held-out responses; at most one


@dataclass(frozen=True)
class Config(Sections):
    """Settings of a run. Nothing changes them: `dataclasses.replace` makes others."""

    @cached_property
    def derived(self) -> Derived:
        """Return what follows from the settings. Raises ConfigError: the loss is not valid."""
        t = self.trainer
        a = self.actor
        r = self.rollout
        teacher = self.teacher
        data = self.data
        loss = loss_spec(self.distill, teacher.temperature)
        routes = _routes(teacher)
        if teacher.routes:
            temperatures = tuple(route.teacher.temperature for route in routes)
            loss = replace(loss, domains=tuple(route.name for route in routes), temperatures=temperatures)
        if teacher.tokenizer:
            loss = replace(loss, compares_texts=True)
        if r.environment:
            loss = replace(loss, turns=min(r.max_turns, NUMBERED_TURNS))
        weights = {key.removeprefix(LOSSES): points for key, points in t.schedules.items() if key.startswith(LOSSES)}
        if points := t.schedules.get(REWARD_WEIGHT):
            weights[REWARD] = points
        loss = replace(loss, schedules=tuple(weights.items()))
        world_size = t.n_gpus_per_node * t.nnodes
        engine_gpus = r.n_gpus_per_node * r.nnodes
        teacher_pool = teacher.kind.pool
        longest = data.max_prompt_length + data.max_response_length
        longest_of_teacher = max(data.max_prompt_length, data.max_teacher_prompt_length) + data.max_response_length
        reference_is_actor = loss.has_reference and a.lora.rank > 0 and not self.reference.path
        has_folder = loss.has_reference and not reference_is_actor
        reference_folder = (self.reference.path or self.model.path) if has_folder else ""
        # A frozen model whose shards stay on the GPU needs the room of the actor's states for its forward pass, unless
        # memory.strategy is resident; `auto` counts as offload until preflight replaces it, see
        # `gkd.memory.footprint.fit`. States that fsdp_cpu_offload keeps on the host need no move. With colocate
        # the allocator's cache is released in any case.
        teacher_stays = teacher_pool == ACTOR and not teacher.fsdp_cpu_offload
        reference_stays = bool(reference_folder) and not self.reference.fsdp_cpu_offload
        needs_room = a.offload_train or ((teacher_stays or reference_stays) and self.memory.strategy != "resident")
        moves_states = t.colocate or (needs_room and not a.fsdp_cpu_offload)
        # Engines alone compare their greedy responses.
        engines_judge = self.eval.metric == EXACT_MATCH and self.eval.n == 1
        has_metric = bool(data.val_files) and self.eval.metric != NO_METRIC and not engines_judge
        vision: Vision = ("frozen" if self.model.freeze_vision else "trained") if data.images_key else "none"
        # The loss of each token contains a sum over the batch: of sequences, of a teacher's tokens, of rewards.
        needs_whole_batch = self.distill.normalize != "token" or bool(teacher.routes or self.reward.functions)
        needs_whole_batch |= is_path(self.distill.response_weight)
        groups = [(key, str(self.value(key))) for key in GROUP_KEYS]
        return Derived(
            loss=loss,
            routes=routes,
            signals=teacher_signals(loss, cast(Signal, "topk" if teacher.signal == BY_UNITS else teacher.signal)),
            n_student_ids={"teacher": 0, "student": teacher.topk, "union": teacher.topk // 2}[self.distill.support],
            max_sequence_length=longest,
            max_teacher_length=longest_of_teacher,
            max_engine_length=longest_of_teacher + 1 if teacher_pool == ROLLOUT else longest,
            world_size=world_size,
            dp_size=world_size // a.group_size,
            n_shards=world_size // (a.tp * a.pp),
            n_engines=engine_gpus // r.tp,
            n_gpus=world_size if t.colocate else world_size + engine_gpus,
            teacher_pool=teacher_pool,
            reference_is_actor=reference_is_actor,
            reference_folder=reference_folder,
            engine_adapter_rank=engine_rank(a.lora.rank) if self.weight_sync.lora == "adapters" else 0,
            moves_states=moves_states,
            early_parts=not needs_whole_batch and not moves_states,
            rewards=tuple(entry.path for entry in self.reward.functions),
            groups=tuple((key, path) for key, path in groups if is_path(path) or path == SOLVED_SIBLING),
            vision=vision,
            metrics=(self.eval.metric,) if has_metric else (),
        )

    def at(self, step: int) -> Config:
        """Return the settings of the rollouts of a step, counted from 0: those of trainer.schedules."""
        values: dict[str, float] = {}
        for key in OF_ROLLOUTS:
            if points := self.trainer.schedules.get(key):
                value = value_at(points, step)
                values[key] = value if isinstance(self.value(key), float) else round(value)
        return self.with_values(values)

    def planned_steps(self, n_prompts: int) -> int:
        """Return the optimizer steps of a run: total_epochs in steps, at least 1, at most total_steps (0: no limit)."""
        by_epochs = max(1, n_prompts * self.trainer.total_epochs // self.trainer.global_batch_size)
        return min(by_epochs, self.trainer.total_steps) if self.trainer.total_steps else by_epochs

    def transport(self, device: str, environ: Mapping[str, str] = os.environ) -> str:
        """Return how the bytes of a run travel; AUTO: the members of a group choose, by their hosts.

        Args:
            device: "cpu" | "cuda".
            environ: of the trainer; its ranks have the same.
        """
        wanted = self.weight_sync.transport
        if wanted != AUTO:
            return wanted
        if device != "cuda":
            return AUTO
        if not self.trainer.colocate:
            return NCCL
        # NCCL needs a GPU for each member. With pipeline stages no card has all tensors. Not every version of torch
        # shares expandable segments with other processes.
        return GLOO if self.actor.pp > 1 or has_expandable_segments(environ) else IPC


def _routes(teacher: TeacherConfig) -> tuple[Route, ...]:
    """Return the teachers by name, so that the order in the YAML does not matter; at least one."""
    routes = []
    for name, entry in sorted(teacher.routes.items()):
        overrides = {key: value for key in _INHERITED if (value := getattr(entry, key)) is not None}
        routes.append(Route(name, replace(teacher, **overrides), entry.weight, frozenset(overrides)))
    return tuple(routes) or (Route("", teacher),)


def logits_chunk_bytes(*, on_cpu: bool) -> int:
    """Return the bytes of a chunk of logits, with the teacher's if there are any.

    On a GPU small chunks are slow: the LM head's gradient is read and written once for each.
    """
    return (128 if on_cpu else 1024) << 20


def engine_rank(rank: int) -> int:
    """Return the smallest of `ENGINE_RANKS` that holds adapters of this rank; 0 without adapters, or if none does."""
    return next((size for size in ENGINE_RANKS if size >= rank), 0) if rank else 0
