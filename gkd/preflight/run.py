"""Check a run, or what `gkd score` needs of one, before any process starts, and return what the checks found.

A mistake does not end the checks: all that have what they need are made, cheap ones first, and find the others.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from gkd.actor.common.optim_spec import OptimSpec
from gkd.config.check import check_config
from gkd.config.declare import is_path
from gkd.config.schema import Config, Route
from gkd.config.schema_sections import STREAM
from gkd.config.schema_teacher import ROLLOUT
from gkd.data.prompts import RowReader, load_prompts, load_tokenizer
from gkd.data.render import Tools
from gkd.data.row_files import describe_files, read_rows
from gkd.errors import ClusterError, ConfigError, TeacherUnavailable
from gkd.hf.hub import FILES, MODELS, pinned_names, with_local_copies
from gkd.hf.model_folder import check_engines, eos_token_ids
from gkd.log import get_logger
from gkd.memory.footprint.estimate import scores_gib
from gkd.preflight.images import check_image_processors, image_reader
from gkd.preflight.machine import check_machine, check_transformer_engine, resolve_device
from gkd.preflight.memory import check_memory
from gkd.preflight.mistakes import Mistakes, usable
from gkd.preflight.replay import check_replay
from gkd.preflight.student import check_student, check_tokenizer_fits, chosen
from gkd.preflight.teacher import (
    check_all_stored,
    check_limits,
    check_masked,
    check_reachable,
    check_teacher,
    recorded_teachers,
    request_info,
    rollout_teacher,
    template_warning,
)
from gkd.preflight.tokenizer_pair import check_pair, teacher_tokenizer, tokenizer_pair
from gkd.preflight.user_code import check_answers, check_functions, check_observations, environment_tools
from gkd.run.folder import RunFolder
from gkd.run.open import check_run_folder, check_same_models, open_run_folder
from gkd.scoring.teacher.client import load_keys
from gkd.scoring.teacher.gpus import teacher_rows, with_own_gpus
from gkd.scoring.teacher.info import TeacherInfo, head_columns
from gkd.scoring.teacher.window import throttle_warning
from gkd.spans import driver
from gkd.text.pair import TokenizerPair
from gkd.types import Prompt

log = get_logger("preflight")

# A warning is logged if scores take more host memory than this.
LARGE_SCORES_GIB = 4.0


@dataclass(frozen=True, slots=True)
class Plan:
    """Results of the checks, for the launcher."""

    device: str  # "cpu" | "cuda"
    eos_ids: list[int]
    train_prompts: list[Prompt] = field(repr=False)
    val_prompts: list[Prompt] = field(repr=False)
    teachers: tuple[TeacherInfo, ...]  # one per route, see `Derived.routes`
    n_vocab: int  # ids that student and teacher share
    total_steps: int  # optimizer steps of the whole run; the learning rate schedule ends there
    # The settings. cluster.gpus, memory.strategy and rollout.max_num_seqs are replaced by what fits, and the names of
    # the hub by their commits.
    config: Config
    data_files: list[dict[str, Any]]  # see `describe_files`
    folder: RunFolder
    pair: TokenizerPair | None = field(default=None, repr=False)  # tokenizers of student and teacher, if they differ


def preflight(config: Config) -> Plan:
    """Check the whole run. The run folder is taken last, so a refused run leaves no files.

    Raises:
        ConfigError: naming key, value and fix; of several mistakes it names each, and the errors below, too.
        ModelError: the student has no end-of-sequence token.
        CheckpointError: the checkpoint to resume from is damaged.
        ClusterError: Ray is not installed.
        TeacherUnavailable: no teacher server replies at teacher.server_ip:server_port, and the run needs one.
    """
    mistakes = Mistakes()
    plan = _checked(config, mistakes)
    mistakes.raise_all()
    assert plan is not None, "without a mistake there is a plan"
    return plan()


def problems(
    config: Config | None, wrong: Sequence[ConfigError] = (), *, with_teacher: bool = True
) -> list[ConfigError]:
    """Make all checks of a run that need no start, and return the mistakes in their order. Writes nothing.

    Args:
        config, wrong: as `gkd.config.load.read_config` returns them.
        with_teacher: ask the teacher's server.
    """
    mistakes = Mistakes()
    if wrong:
        mistakes.add(ConfigError.together(wrong))
    if config is not None:
        _checked(config, mistakes, with_teacher=with_teacher)
    return mistakes.found


def _checked(config: Config, mistakes: Mistakes, *, with_teacher: bool = True) -> Callable[[], Plan] | None:
    """Make each check that has what it needs, and add the mistakes.

    Returns:
        What takes the run folder; None with a mistake, or if the teacher was not asked.
    """
    config = usable(config, mistakes)
    derived = config.derived
    on_hub, recorded = _without_torch(config, mistakes, with_teacher=with_teacher)
    teachers = recorded
    with mistakes.step("distill.loss"):
        if any(is_path(term.name) for term in derived.loss.terms):
            from gkd.preflight.loss_functions import check_loss_functions  # imports torch

            check_loss_functions(config)
    if on_hub and mistakes.found:
        log.warning("%s: downloaded and checked when the other mistakes are corrected", ", ".join(on_hub))
        mistakes.keys |= on_hub.keys()
    for key in (*MODELS, *FILES):
        if key not in mistakes.keys:
            with mistakes.step(key):
                config = with_local_copies(config, (key,))
    log.info("checking the model, the prompts and the teacher")
    device = ""  # empty: unknown
    n_student_vocab = 0
    tokenizer = None
    eos_ids: list[int] = []
    with mistakes.step("trainer.device"):
        device = _checked_device(config)
    model = "model.path", config.model.path
    with mistakes.step(*model):
        config = chosen(config)
        n_student_vocab = check_student(config)
    with mistakes.step(*model):
        tokenizer, eos_ids = read_tokenizer(config, n_student_vocab or sys.maxsize)
    is_model = bool(device and n_student_vocab and tokenizer is not None)
    if is_model:
        with mistakes.step(*model):
            check_engines(config, device)
    train, val, other_tokenizer = _read_prompts(config, tokenizer, eos_ids, mistakes)
    judges = ("reward.functions", derived.rewards, train), ("eval.metric", derived.metrics, val)
    for key, paths, prompts in judges:
        with mistakes.step(key):
            check_functions(config, key, paths, prompts, tokenizer)
    total_steps = 0
    if train:
        with mistakes.step("trainer.total_steps"):
            total_steps = config.planned_steps(len(train))
            if warning := early_end_warning(config, len(train)):
                log.warning("%s", warning)
            check_schedule(config, total_steps)
            check_stream_fits(config, total_steps)
    if device and not teachers and (with_teacher or derived.teacher_pool):
        with mistakes.step("teacher.path", config.teacher.path):
            recorded = _known_teachers(config)
            teachers = recorded or find_teachers(config, device)
    if not is_model:
        return None
    n_vocab = config.model.n_vocab or n_student_vocab
    pair: TokenizerPair | None = None
    identity: dict[str, Any] = {}
    with_gpus = config
    is_whole = False
    with mistakes.step("trainer.replay", config.trainer.replay):
        if teachers and train is not None and val is not None:
            teachers = _probed(config, teachers, other_tokenizer or tokenizer, train, n_student_vocab)
            check_image_processors(config, teachers)
            if device == "cuda":
                with_gpus = with_own_gpus(config, device, teacher_rows(derived.routes)[0])
            identity = teacher_identity(derived.routes, teachers)
            check_replay(config.with_values(on_hub), total_steps, identity)
            pair, n_vocab = _shared_ids(config, teachers, tokenizer, other_tokenizer, n_student_vocab, eos_ids, train)
            if recorded:
                check_all_stored(config, train, teachers, n_vocab, eos_ids)
            if n_vocab < n_student_vocab:
                n = n_student_vocab - n_vocab if device == "cuda" else 0
                check_masked(config, n_vocab, eos_ids, [*train, *val], n_masked=n, is_shared=pair is None)
                config = replace(config, model=replace(config.model, n_vocab=n_vocab))
                with_gpus = replace(with_gpus, model=config.model)
            is_whole = True
    with mistakes.step(*model):
        if derived.reference_folder:
            from gkd.preflight.meta_models import check_reference  # imports torch and transformers

            identity["reference"] = check_reference(config, tokenizer, n_vocab)
    _, hidden_size = head_columns(teachers)  # number of columns of `hidden`: see `ScoringEndpoint.lm_head`
    gib = scores_gib(config, n_vocab, hidden_size, len(val or ()))
    if pair is not None:  # the head has the teacher's rows: as many numbers as one of the student's rows and this size
        hidden_size = -(-hidden_size * len(pair.teacher) // n_vocab)
    with mistakes.step("memory.strategy"):
        with_gpus = check_memory(with_gpus, device, hidden_size, gib)
    warn_about_settings(config, gib)
    if mistakes.found or not is_whole:
        return None
    assert train is not None and val is not None, "the run is whole"
    data_files = describe_files(config.data)
    kept = config.with_values(on_hub)
    with mistakes.step("trainer.run_dir", config.trainer.run_dir):
        check_same_models(kept, identity, data_files)
    log.info(
        "teacher %s (%s), %d %s token ids; %d training, %d held-out prompts; %d steps; device %s; run folder %s",
        ", ".join(teacher.model_name for teacher in teachers),
        teachers[0].engine,
        n_vocab,
        "shared" if pair is None else "student",
        len(train),
        len(val),
        total_steps,
        device,
        Path(config.trainer.run_dir).absolute(),
    )
    config = replace(with_gpus, trainer=config.trainer).with_values(on_hub)
    plan = partial(Plan, device, eos_ids, train, val, teachers, n_vocab, total_steps, config, data_files, pair=pair)
    return lambda: plan(folder=open_run_folder(kept, identity, data_files))


def _without_torch(
    config: Config, mistakes: Mistakes, *, with_teacher: bool
) -> tuple[dict[str, Any], tuple[TeacherInfo, ...]]:
    """Check what needs no torch. Return the commits of the hub's names, and what `_known_teachers` returns."""
    on_hub: dict[str, Any] = {}
    teachers: tuple[TeacherInfo, ...] = ()
    with mistakes.step("ray", "missing"):
        check_ray_installed()
    with mistakes.step("trainer.loggers"):
        check_trackers_installed(config)
    for route in config.derived.routes:
        with mistakes.step(route.key("keys")):
            load_keys(route.teacher.keys)
    for key in (*MODELS, *FILES):
        with mistakes.step(key):
            on_hub |= pinned_names(config, (key,))
    with mistakes.step("trainer.run_dir"):
        check_run_folder(config.with_values(on_hub))
    with mistakes.step("teacher.server_ip"):
        try:
            teachers = _known_teachers(config) if with_teacher else ()
        except TeacherUnavailable as error:  # the last check tries again
            log.warning("%s; the other checks go on", error)
    return on_hub, teachers


def _known_teachers(config: Config) -> tuple[TeacherInfo, ...]:
    """Return the teachers if they are known without a server. Raises TeacherUnavailable: see `recorded_teachers`."""
    if not config.derived.teacher_pool:
        try:
            for route in config.derived.routes:
                check_reachable(route)
        except TeacherUnavailable as error:
            return recorded_teachers(config, error)
    return ()


def _read_prompts(
    config: Config, tokenizer: Any, eos_ids: Sequence[int], mistakes: Mistakes
) -> tuple[list[Prompt] | None, list[Prompt] | None, Any]:
    """Return the prompts for training and the held-out ones, None if they are wrong, and the teacher's own tokenizer.

    Args:
        tokenizer: None: it is wrong, so that only the columns of the rows are checked.
    """
    train: list[Prompt] | None = None
    val: list[Prompt] | None = None
    other_tokenizer = tools = None
    with mistakes.step("model.path", config.model.path):
        other_tokenizer = teacher_tokenizer(config)
        if tokenizer is not None:
            check_observations(config, tokenizer, eos_ids, found := environment_tools(config, tokenizer))
            tools = found
    if tools is not None:
        with mistakes.step("data.train_files", config.data.train_files):
            train = training_prompts(config, tokenizer, eos_ids, tools, other_tokenizer)
        with mistakes.step("data.val_files", config.data.val_files):
            val = _held_out(config, tokenizer, tools, other_tokenizer)
    for key, prompts in (("data.train_files", train), ("data.val_files", val)):
        with mistakes.step(key):
            if prompts is None:
                _check_columns(config, key)
    return train, val, other_tokenizer


def _check_columns(config: Config, key: str) -> None:
    """Raise ConfigError if a file cannot be read, or a row has no column of prompts."""
    name = "data.messages_key" if config.data.messages_key else "data.prompt_key"
    for file in config.value(key):
        for where, row in read_rows(file, key):
            if config.value(name) not in row:
                raise config.error(name, f"{where} has only the columns {sorted(row)}.", "name the prompts' column.")


def _shared_ids(
    config: Config,
    teachers: Sequence[TeacherInfo],
    tokenizer: Any,
    other_tokenizer: Any,
    n_student_vocab: int,
    eos_ids: Sequence[int],
    train: Sequence[Prompt],
) -> tuple[TokenizerPair | None, int]:
    """Return the pair of different tokenizers, and the number of the student's ids that the loss compares.

    Args:
        other_tokenizer: the teacher's, if its tokens are others.

    Raises:
        ConfigError: the tokenizers or the limits of a teacher do not fit.
    """
    if other_tokenizer is None:
        return None, common_vocab(config, teachers, tokenizer, n_student_vocab)
    n_vocab = config.model.n_vocab or n_student_vocab
    pair = tokenizer_pair(config, tokenizer, other_tokenizer, teachers[0], n_vocab, eos_ids)
    check_limits(config, config.derived.routes[0], teachers[0], "teacher", pair.n_listed)
    check_pair(config, config.derived.routes[0], pair, train)
    return pair, n_vocab


def _checked_device(config: Config) -> str:
    """Return cpu or cuda. Raises ConfigError: this machine or a setting does not fit it."""
    device = resolve_device(config)
    if device == "cuda" and not config.cluster.ray_address:
        check_machine()
        if config.actor.backend.supports("layers", "te"):
            check_transformer_engine(config.actor.layers)
    return device


def read_student(config: Config) -> tuple[Any, int, list[int]]:
    """Return the student's tokenizer, the rows of its embedding, and its end tokens. Raises ConfigError, ModelError."""
    n_vocab = check_student(config)
    tokenizer, eos_ids = read_tokenizer(config, n_vocab)
    return tokenizer, n_vocab, eos_ids


def read_tokenizer(config: Config, n_vocab: int) -> tuple[Any, list[int]]:
    """Return the student's tokenizer and its end tokens. Raises ConfigError, ModelError.

    Args:
        n_vocab: rows of the student's embedding.
    """
    tokenizer = load_tokenizer(config.model.path, "model.path", trust_remote_code=config.model.trust_remote_code)
    check_tokenizer_fits(config, tokenizer, n_vocab)
    own, more = eos_token_ids(config.model.path, tokenizer), config.rollout.stop_token_ids
    for key, value, ids, fix in (
        ("model.path", config.model.path, own, "correct eos_token_id in generation_config.json or config.json."),
        ("rollout.stop_token_ids", more, more, "name token ids of the student."),
    ):
        if outside := [i for i in ids if not 0 <= i < n_vocab]:  # vLLM would refuse them, after the start
            problem = f"end tokens {outside} are outside of the student's {n_vocab} token ids."
            raise ConfigError(key, value, problem, fix)
    return tokenizer, sorted({*own, *more})


def common_vocab(config: Config, teachers: Sequence[TeacherInfo], tokenizer: Any, n_student_vocab: int) -> int:
    """Return the number of ids that the student and all teachers share. Raises as `check_teacher`."""
    n_vocab = config.model.n_vocab or n_student_vocab
    for route, teacher in zip(config.derived.routes, teachers, strict=True):
        n_vocab = min(n_vocab, check_teacher(config, route, teacher, tokenizer, n_student_vocab))
        trusts = config.model.trust_remote_code
        differing = template_warning(config.data, tokenizer, teacher, trust_remote_code=trusts)
        for warning in (throttle_warning(config.teacher, teacher), differing):
            if warning:
                log.warning("%s", warning)
    return n_vocab


def training_prompts(
    config: Config, tokenizer: Any, eos_ids: Sequence[int], tools: Tools, teacher_tokenizer: Any = None
) -> list[Prompt]:
    """Load and check data.train_files; log how many prompts were dropped and responses truncated."""
    ends = eos_ids if config.distill.on_policy_share < 1 else None
    reader = RowReader(config.data, tokenizer, config.teacher, tools, ends, teacher_tokenizer, image_reader(config))
    keep_rows = bool(config.derived.rewards or config.rollout.environment)
    train, dropped = load_prompts(config.data.train_files, "data.train_files", reader, keep_rows=keep_rows)
    check_answers(config, "data.train_files", train, [("reward.functions", path) for path in config.derived.rewards])
    check_shares(config, train)
    if dropped:
        log.warning("dropped %d training prompts longer than data.max_prompt_length or that of the teacher", dropped)
    n_truncated = sum(p.response_ids is not None and int(p.response_ids[-1]) not in eos_ids for p in train)
    if n_truncated:
        log.warning("truncated %d dataset responses to data.max_response_length, without an end token", n_truncated)
    return train


def find_teachers(config: Config, device: str) -> tuple[TeacherInfo, ...]:
    """Return the description of the teacher of each route. Raises as `request_info`, or as `local_teacher`."""
    derived = config.derived
    if not derived.teacher_pool:
        with driver.doing("waiting for the teacher's description"):
            return tuple(request_info(route) for route in derived.routes)
    if derived.teacher_pool == ROLLOUT:
        return (rollout_teacher(config, device),)
    from gkd.preflight.meta_models import local_teacher  # imports torch and transformers

    return (local_teacher(config, device),)


def _probed(
    config: Config, teachers: tuple[TeacherInfo, ...], tokenizer: Any, train: Sequence[Prompt], n_student_vocab: int
) -> tuple[TeacherInfo, ...]:
    """Return the teachers, with what probes tell of those that are not described.

    Raises as `gkd.preflight.http_teacher.probed`.

    Args:
        tokenizer: whose ids the teachers read.
    """
    if all(route.teacher.kind.is_described for route in config.derived.routes):
        return teachers
    from gkd.preflight.http_teacher import probed  # imports aiohttp

    n_ids = config.model.n_vocab or n_student_vocab
    if config.teacher.tokenizer:
        n_ids = 1 + max(tokenizer.get_vocab().values())
    return tuple(
        teacher if route.teacher.kind.is_described else probed(config, route, teacher, tokenizer, train, n_ids)
        for route, teacher in zip(config.derived.routes, teachers, strict=True)
    )


def teacher_identity(routes: Sequence[Route], teachers: Sequence[TeacherInfo]) -> dict[str, Any]:
    """Return the content of teacher.json: name, fingerprint and dtype of the teacher; of several also `routes`.

    Of an HTTP teacher also the logprobs of its probe.
    """
    each = [
        {"name": teacher.model_name, "fingerprint": teacher.fingerprint, "dtype": teacher.dtype}
        | ({"probe": list(teacher.probe.logprobs)} if teacher.probe else {})
        for teacher in teachers
    ]
    if not routes[0].name:
        return dict(each[0])
    return {**each[0], "routes": {route.name: one for route, one in zip(routes, each, strict=True)}}


def check_shares(config: Config, prompts: Sequence[Prompt]) -> None:
    """Raise ConfigError if data.domain_shares has a route that no row names."""
    found = {prompt.route for prompt in prompts}
    missing = [route.name for i, route in enumerate(config.derived.routes) if i not in found]
    if config.data.domain_shares and missing:
        problem = f"no row of data.train_files names the route {missing[0]}."
        raise config.error("data.domain_shares", problem, "add rows, or remove the route.")


def check_schedule(config: Config, total_steps: int) -> None:
    """Raise ConfigError if the decay is longer than the run. Log a warning if the run ends with its warm-up."""
    spec = OptimSpec(**vars(config.actor.optim), total_steps=total_steps)
    if spec.warmup_steps >= total_steps:
        text = "actor.optim.warmup_steps %d: the run has %d steps, so it ends at %.3g of actor.optim.lr or less"
        log.warning(text, spec.warmup_steps, total_steps, spec.lr_at(total_steps - 1) / spec.lr)


def check_stream_fits(config: Config, total_steps: int) -> None:
    """Raise ConfigError if a stream would have more sequences than int32 can number."""
    most = 2**31 // (config.trainer.global_batch_size * config.rollout.n)
    if config.trainer.scheduler == STREAM and total_steps > most:
        problem = f"with trainer.scheduler=stream and this batch size a run has at most {most} steps."
        fix = "lower it, and continue in a new run with the export of this one as model.path."
        raise ConfigError("trainer.total_steps", total_steps, problem, fix)


def early_end_warning(config: Config, n_prompts: int) -> str:
    """Return a sentence if the epochs end the run before total_steps, else "": in TRL, steps override epochs."""
    t, steps = config.trainer, config.planned_steps(n_prompts)
    if steps >= t.total_steps:
        return ""
    return (
        f"trainer.total_steps = {t.total_steps} is not reached: trainer.total_epochs = {t.total_epochs} of {n_prompts} "
        f"prompts in batches of {t.global_batch_size} ends the run after step {steps}. Fix: increase total_epochs"
    )


def check_ray_installed() -> None:
    """Raise ClusterError if Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise ClusterError("Ray is not installed in this environment. Fix: create one with launch/setup.sh.")


def check_trackers_installed(config: Config) -> None:
    """Import nothing, and raise ConfigError if a tracker's library, which has its name, is not installed."""
    for name in config.trainer.loggers:
        if importlib.util.find_spec(name) is None:
            fix = f'python -m pip install -e ".[{name}]" in the checkout, or remove it from the list.'
            raise ConfigError("trainer.loggers", name, "the library is not installed.", fix)


def _held_out(config: Config, tokenizer: Any, tools: Tools, teacher_tokenizer: Any) -> list[Prompt]:
    """Load the held-out prompts. Raises ConfigError if eval.metric needs answers that they do not have."""
    if not config.data.val_files:
        return []
    images = image_reader(config)
    reader = RowReader(
        config.data, tokenizer, config.teacher, tools, teacher_tokenizer=teacher_tokenizer, images=images
    )
    keep_rows = bool(config.derived.metrics or config.rollout.environment)
    prompts, dropped = load_prompts(config.data.val_files, "data.val_files", reader, keep_rows=keep_rows)
    if dropped:
        log.warning("dropped %d held-out prompts longer than data.max_prompt_length", dropped)
    check_answers(config, "data.val_files", prompts, [("eval.metric", config.eval.metric)])
    return prompts


def stale_losses(config: Config) -> list[str]:
    """Return the losses of a run with stale rollouts that are sensitive to them; see docs/losses.md."""
    if not config.trainer.staleness_bound or not config.distill.on_policy_share:
        return []
    spec = config.derived.loss
    return [term.name for term in spec.terms if term.name == "reverse_kl" or term in spec.policy_gradients]


def warn_about_settings(config: Config, gib: float) -> None:
    """Log warnings about valid settings that may be unintended.

    Args:
        gib: result of `scores_gib`.
    """
    if config.trainer.global_batch_size < config.derived.n_engines:
        log.warning(
            "trainer.global_batch_size %d is less than the number of engines (%d): some engines will be idle",
            config.trainer.global_batch_size,
            config.derived.n_engines,
        )
    actor = config.actor
    per_node = config.trainer.n_gpus_per_node
    if actor.cp > 1 and per_node % (actor.tp * actor.cp):
        log.warning(
            "actor.cp %d: trainer.n_gpus_per_node %d is not a multiple of actor.tp x actor.cp = %d, so some groups of "
            "ranks that exchange queries, keys and values have members on two nodes",
            actor.cp,
            per_node,
            actor.tp * actor.cp,
        )
    if config.actor.offload_train and config.actor.fsdp_cpu_offload:
        log.warning("actor.offload_train is ignored: actor.fsdp_cpu_offload keeps the states in host memory already")
    if gib > LARGE_SCORES_GIB:
        log.warning(
            "teacher.signal=%s: scores may take %.1f GiB of host memory over all data-parallel groups, and twice that "
            "while they are written to disk. Smaller: hidden instead of logits, topk instead of hidden, a smaller "
            "teacher.topk or eval.max_prompts",
            config.teacher.signal,
            gib,
        )
    spec = config.derived.loss
    if (spec.uses_samples or spec.has_rewards) and config.rollout.truncation:
        names = [term.name for term in spec.policy_gradients] + ["rewards"] * spec.has_rewards
        names += ["distill.tail=residual"] * spec.has_residual
        log.warning(
            "%s: tokens outside are never sampled, so %s cannot learn from them",
            config.rollout.truncation,
            ", ".join([*names, "the reference's KL"] if spec.reference_weight else names),
        )
    if sensitive := stale_losses(config):
        log.warning(
            "%s with rollouts up to %d steps old (trainer.scheduler=%s): older weights than those that train generated "
            "them, which may cost quality (quickstart with reverse_kl: accuracy 97.3%% under sync, 98.6%% one step off "
            "and 95.7%% two). Compare with trainer.scheduler=sync; see docs/losses.md",
            ", ".join(sensitive),
            config.trainer.staleness_bound,
            config.trainer.scheduler,
        )
    share = config.distill.on_policy_share
    unused = "student" if spec.sft and len(spec.terms) == 1 and share else None
    if len(spec.policy_gradients) == len(spec.terms) and share < 1.0:
        unused = "dataset"
    if unused:
        log.warning(
            "distill.on_policy_share=%g: no loss learns from %s responses, but their tokens count in the mean",
            share,
            unused,
        )


@dataclass(frozen=True, slots=True)
class ScoringPlan:
    """Hold what to score, and the teachers of it."""

    config: Config
    prompts: list[Prompt]  # dataset prompts with their responses
    eos_ids: list[int]
    teachers: tuple[TeacherInfo, ...]  # one per route
    n_vocab: int  # ids that student and teachers share


def check_scoring(config: Config) -> ScoringPlan:
    """Check the settings of a run, its data and its teachers. Needs no GPU, and makes no run folder.

    Raises:
        ConfigError: naming key, value and fix: also if there is no store, or it cannot keep a teacher's scores.
        TeacherUnavailable: no teacher server replies.
    """
    check_config(config)
    if not config.teacher.store:
        fix = "name a folder, and use distill.on_policy_share below 1."
        raise config.error("teacher.store", "scores need a folder that keeps them.", fix)
    for route in config.derived.routes:
        if not route.teacher.kind.is_described:
            problem = "these servers send no digest of their weights, so the store keeps no scores of them."
            raise route.error("backend", problem, "use a teacher server: gkd teacher.")
        check_reachable(route)
    config = with_local_copies(config.with_values(pinned_names(config)), (*MODELS, *FILES))
    config = chosen(config)
    tokenizer, n_student_vocab, eos_ids = read_student(config)
    prompts = training_prompts(config, tokenizer, eos_ids, environment_tools(config, tokenizer))
    teachers = find_teachers(config, "cpu")
    n_vocab = common_vocab(config, teachers, tokenizer, n_student_vocab)
    if n_vocab < n_student_vocab:
        check_masked(config, n_vocab, eos_ids, prompts)
    return ScoringPlan(config, prompts, eos_ids, teachers, n_vocab)
